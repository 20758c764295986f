"""The errors that `kernels` raises for what a user, a file or a peer can cause.

::

    ModelError        the model folder or file cannot be served, and the message says why
    NotNative         the native engine is not to be had, or not for this model: another is taken

A value that breaks the engine's contract (a payload of the wrong size, a span beyond its table) is
a plain `ValueError`. This module knows nothing of the models themselves.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be loaded or served as asked; the message names the model and the reason."""


class NotNative(Exception):
    """The native engine cannot be used here or for this model; the message is the reason."""
