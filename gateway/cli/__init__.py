"""Commands that ask a running server over HTTP."""
