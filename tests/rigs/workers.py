"""Which test runs in which worker, and what is begun first."""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

LONGEST = ("servers", "nodes", "engine", "tiers")
"""Begun first, so that what is left for the end is short and no worker waits long for another."""


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """A worker runs a module in one piece, so that its fixtures are made once.

    What starts whole servers (`tests/system`) runs in one worker, one after another.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = Path(nodeid.split("::", 1)[0])
        return "servers" if "system" in module.parts else str(module)

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=place), last=False)
        super()._assign_work_unit(node)


def place(scope: str) -> int:
    """Before which others a scope begins; among equals, the one with most tests does."""
    parts = Path(scope).parts
    return next((at for at, room in enumerate(LONGEST) if room in parts), len(LONGEST))
