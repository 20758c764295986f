"""`kvferry serve`: every role on this host, started, watched, restarted and ended together.

Owns the child processes, their status pipes and the listening HTTP socket, which outlives any
gateway. Knows nothing of requests or blocks, and never imports a role: it runs command lines.

    bind the port → resolve the model → start the store → its address → start the nodes
    → their addresses → start the gateway
    → all ready: "serves" → (a role ends: start it again, at its old address)
    → SIGTERM: the gateway ends, then the nodes, then the store, when their blocks are on disk
    → another one: streams and what is not written are given up → a third one: all are killed
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.gateway.serve.config import ServeConfig
from kvferry.gateway.serve.placement import (
    RoleSpec,
    StorePlan,
    place,
    plan_store,
    role_specs,
    store_spec,
)
from kvferry.gateway.serve.restarts import CONFIG_ERROR, ReportReader, Restarts, RoleReport
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.busy import BusyBoard, make_board
from kvferry.kvstore.process.cores import available_cores
from kvferry.kvstore.process.lifecycle import StopSignal, die_with_parent
from kvferry.kvstore.process.listener import bind, url
from kvferry.kvstore.process.logs import set_up_logging
from kvferry.kvstore.process.model_files import content_digest, resolve_model
from kvferry.kvstore.process.settings import format_size, parse

_log = logging.getLogger(__name__)

_ANY_PORT = "tcp://127.0.0.1:0"
_GRACE_S = 5.0
"""What a role gets between being asked to end and being killed, beyond its own time limit."""
_STARTING_GRACE_S = 0.5
"""The same when nothing is served yet and a sibling cannot work."""


def run(argv: Sequence[str]) -> int:
    config = parse(
        ServeConfig,
        argv,
        os.environ,
        prog="kvferry serve",
        description="Serves a model: gateway, decode node, prefill node and store on this host.",
    )
    http = config.gateway
    set_up_logging("serve", http.log_level, http.log_format)
    cores = available_cores()
    placement = place(config, cores)
    with bind(http.host, http.port) as listener:
        model = resolve_model(http.model, http.cache_dir, _log.info)
        content_digest(model.folder, http.cache_dir)  # once here, not once in each node
        gateway, nodes = role_specs(config, placement, model, os.environ)
        plan = plan_store(config, len(cores))
        _tell(plan)
        name = (*http.served_model_name, model.name)[0]
        supervisor = Supervisor(
            gateway,
            nodes,
            listener,
            shutdown_timeout=http.shutdown_timeout,
            on_ready=lambda: print(f"kvferry serves {name} at {url(listener)}/v1", flush=True),
            store=None if plan is None else store_spec(config, placement, plan, os.environ),
        )
        with StopSignal(on_second=supervisor.insist) as stop:
            return supervisor.run(stop)


def _tell(plan: StorePlan | None) -> None:
    if plan is None:
        _log.info("without a store: blocks live in the nodes' memory only")
        return
    ram, disk = (_about(size) for size in (plan.ram, plan.disk))
    _log.info("the store may take %s of memory, and %s of disk in %s", ram, disk, plan.folder)


def _about(size: int) -> str:
    whole = size >> 20
    return format_size(whole << 20) if whole else format_size(size)


class _Role:
    """One role and, while it runs, its process and status pipe."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.address = _ANY_PORT
        self.restarts = Restarts()
        self.start_at: float | None = None
        """When to start it; None: not now."""
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe = -1
        self.reader = ReportReader()
        self.error = ""
        """Why it says it cannot work."""

    @property
    def title(self) -> str:
        name = self.spec.name
        return name if name in ("gateway", "store") else f"{name} node"

    @property
    def located(self) -> bool:
        return self.address != _ANY_PORT

    def start(self, extra: Sequence[str], inherited: Sequence[int]) -> None:
        self.pipe, writer = os.pipe()
        os.set_blocking(self.pipe, False)
        self.reader = ReportReader()
        self.start_at = None
        try:
            # A session of its own: the terminal's Ctrl-C reaches the supervisor only.
            self.process = subprocess.Popen(
                [*self.spec.command, f"--status-fd={writer}", *extra],
                env=dict(self.spec.environ),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[writer, *inherited],
                start_new_session=True,
                preexec_fn=partial(_before_exec, os.getpid(), self.spec.cores),
            )
        finally:
            os.close(writer)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def reap(self) -> int:
        """Its exit status; a process that closed its pipe without ending is killed."""
        assert self.process is not None
        try:
            status = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            status = self.process.wait()
        os.close(self.pipe)
        self.process = None
        return status


def _before_exec(parent: int, cores: frozenset[int] | None) -> None:
    die_with_parent(parent)
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


class Supervisor:
    """Runs one gateway, its nodes and their store until it is told to stop or one cannot work."""

    def __init__(
        self,
        gateway: RoleSpec,
        nodes: Sequence[RoleSpec],
        listener: socket.socket,
        *,
        shutdown_timeout: float,
        on_ready: Callable[[], None],
        store: RoleSpec | None = None,
    ) -> None:
        self._gateway = _Role(gateway)
        self._nodes = [_Role(spec) for spec in nodes]
        self._stores = [_Role(store)] if store is not None else []
        self._board_fd = make_board(len(self._nodes))
        self._board = BusyBoard(self._board_fd)
        self._roles = [*self._stores, *self._nodes, self._gateway]
        self._listener = listener
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._ending: list[_Role] | None = None
        """None while serving; then the roles whose end is awaited."""
        self._deadline = 0.0
        self._status = 0
        self._failure = ""
        self._served = False
        self._insisted = False

    def run(self, stop: StopSignal) -> int:
        """Serves until the end; 0 after a drain in which nothing had to be killed.

        Raises
        ------
        ConfigError
            A role cannot work as it was told to; all others have been ended.
        """
        self._selector.register(stop, selectors.EVENT_READ, partial(self._stop, stop))
        for role in self._stores or self._nodes:
            self._start(role)
        with self._selector:
            while True:
                for key, _ in self._selector.select(self._timeout()):
                    key.data()
                self._on_time(time.monotonic())
                if self._ending is not None and not any(role.process for role in self._roles):
                    break
        if self._failure:
            raise ConfigError(self._failure)
        return self._status

    def insist(self) -> None:
        """A signal behind the first one, in its handler: the second hurries, the third kills."""
        if self._insisted:
            self._kill()
        self._insisted = True

    def _kill(self) -> None:
        """Ends every role and this process at once."""
        for role in self._roles:
            role.signal(signal.SIGKILL)
        os._exit(128 + signal.SIGINT)

    # -- starting ------------------------------------------------------------------------------

    def _start(self, role: _Role) -> None:
        if role is self._gateway:
            fd = self._listener.fileno()
            others = [*self._nodes, *self._stores]
            at = [f"--{other.spec.role}-node={other.address}" for other in others]
            role.start([f"--fd={fd}", *at], [fd])
        elif role in self._nodes:
            at = [f"--store={store.address}" for store in self._stores]
            line = self._nodes.index(role)
            self._board.set(line, False)  # whoever had it before may have died computing
            board = [f"--busy-fd={self._board_fd}", f"--busy-line={line}"]
            role.start([f"--listen={role.address}", *board, *at], [self._board_fd])
        else:
            role.start([f"--listen={role.address}"], [])
        self._selector.register(role.pipe, selectors.EVENT_READ, partial(self._hear, role))

    def _hear(self, role: _Role) -> None:
        data = os.read(role.pipe, 65536)
        for report in role.reader.feed(data):
            self._note(role, report)
        if not data:
            self._selector.unregister(role.pipe)
            self._ended(role, role.reap())

    def _note(self, role: _Role, report: RoleReport) -> None:
        if report.address:
            role.address = report.address
        if report.error:
            role.error = report.error
        if report.ready:
            role.restarts.became_ready(time.monotonic())
            _log.debug("the %s is ready", role.title)
            if not self._served and all(role.restarts.ever_ready for role in self._roles):
                self._served = True
                self._on_ready()
        self._start_next()

    def _start_next(self) -> None:
        """Starts those that have waited for the addresses of others."""
        for role, needs in (
            *((node, self._stores) for node in self._nodes),
            (self._gateway, self._nodes),
        ):
            waits = role.process is None and role.start_at is None and self._ending is None
            if waits and all(other.located for other in needs):
                self._start(role)

    # -- ending --------------------------------------------------------------------------------

    def _ended(self, role: _Role, status: int) -> None:
        name, now = role.title, time.monotonic()
        if self._ending is not None:
            return
        if role in self._nodes:
            self._board.set(self._nodes.index(role), False)
        delay = role.restarts.ended(status, now)
        manner = role.error if role.error else _manner(status)
        if delay is not None:
            role.start_at, role.error = now + delay, ""
            _log.warning("the %s ended (%s): again in %.1f s", name, manner, delay)
            return
        if status == CONFIG_ERROR:
            self._failure = f"{name}: {manner}"
        else:
            _log.error("the %s never became ready (%s): giving up", name, manner)
        patience = _GRACE_S if self._served else _STARTING_GRACE_S
        self._end(self._roles, patience, max(status, 1))

    def _stop(self, stop: StopSignal) -> None:
        stop.acknowledge()
        if self._ending is None:
            _log.info("stopping: running requests get up to %g s", self._shutdown_timeout)
            self._end([self._gateway], self._patience, 0)
        elif self._ending == [self._gateway]:
            _log.info("stopping now: running requests are ended")
            self._end([self._gateway], _GRACE_S, 0)
        elif self._ending == self._stores:
            _log.info("stopping now: what is not on disk yet is given up")
            self._end(self._stores, _GRACE_S, 0)

    @property
    def _patience(self) -> float:
        """Seconds that a role gets to finish, from now on."""
        return _GRACE_S if self._insisted else self._shutdown_timeout + _GRACE_S

    def _end(self, roles: list[_Role], patience: float, status: int) -> None:
        self._ending, self._status = roles, status or self._status
        self._deadline = time.monotonic() + patience
        for role in roles:
            role.signal(signal.SIGTERM)

    def _on_time(self, now: float) -> None:
        if self._ending is None:
            for role in self._roles:
                if role.start_at is not None and role.start_at <= now:
                    self._start(role)
            return
        waiting = [role for role in self._ending if role.process]
        if not waiting and self._ending == [self._gateway]:
            self._end(self._nodes, _GRACE_S, 0)
        elif not waiting and self._ending == self._nodes and self._stores:
            self._end(self._stores, self._patience, 0)
        elif waiting and now >= self._deadline:
            for role in waiting:
                level = logging.DEBUG if self._status else logging.ERROR
                _log.log(level, "the %s did not end in time: killed", role.title)
                role.signal(signal.SIGKILL)
            self._status = self._status or 1
            self._deadline = float("inf")

    def _timeout(self) -> float | None:
        times = [role.start_at for role in self._roles if role.start_at is not None]
        if self._ending is not None:
            times = [self._deadline]
        due = min(times, default=float("inf"))
        return None if due == float("inf") else max(0.0, due - time.monotonic())


def _manner(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name
