"""Which test runs in which worker, and what is begun first."""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """A worker runs a module in one piece, so that its fixtures are made once.

    What starts whole servers (`tests/system`) runs in one worker, one after another.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = Path(nodeid.split("::", 1)[0])
        return "servers" if "system" in module.parts else str(module)
