"""The running gateway as one value: what it serves, with which nodes, and whether it still does.

Owns the state that outlives a request: the nodes, the open generations, the drain. It accepts or
refuses work as a whole and follows each generation to its end; it knows no path and no body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from kvferry.gateway.auth import Keys
from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import Aborted, ApiError, Unavailable, no_node, shutting_down
from kvferry.gateway.intake.dispatch import Intake
from kvferry.gateway.prompt.memory import LastPrompts
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.prompt.prompts import PromptMaker, Shape
from kvferry.gateway.protocols.common import ReadingContext
from kvferry.gateway.router.generation import Generation, Timeouts, Update
from kvferry.gateway.router.nodes import Nodes
from kvferry.gateway.router.pacing import RequestPacer
from kvferry.gateway.telemetry.metrics import Metrics
from kvferry.gateway.telemetry.tracing import open_tracer

REQUESTS_A_TURN = 4
"""How many requests may begin in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose generation it is, and what it is called: ids are never keys, several may share one."""

    tenant: str
    names: frozenset[str]


class Gateway:
    """Everything a request handler needs."""

    def __init__(self, config: GatewayConfig, model: ServedModel, nodes: Nodes) -> None:
        self.config = config
        self.model = model
        self.nodes = nodes
        self.timeouts = Timeouts(
            config.first_token_timeout, config.request_timeout, config.resume_timeout
        )
        self.keys = Keys(config.api_key)
        self.admin_keys = Keys((config.admin_api_key,) if config.admin_api_key else ())
        self.metrics = Metrics(model.name, nodes, self.unanswered, config.metrics_compat)
        nodes.on_lag = self.metrics.lagged
        self.prompts = PromptMaker(model)
        self.request_pacer = RequestPacer(REQUESTS_A_TURN)
        context = ReadingContext(model, self.prompts, config.enable_test_hooks)
        self.intake = Intake(config, context)
        self.tracer = open_tracer(config.otlp_traces_endpoint, model.name)
        self.last_prompts = LastPrompts()
        self.started = time.time()
        self.paused = False
        """An operator lets nothing new in."""
        self.open: dict[Generation, Origin] = {}
        self._ending = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        self.nodes.close()
        self.intake.close()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def draining(self) -> bool:
        """Nothing new is accepted: the process ends, or an operator said so."""
        return self._ending or self.paused

    # -- taking work -------------------------------------------------------------------------------

    def unanswered(self) -> int:
        """Generations without a first token."""
        return sum(not generation.timeline.first for generation in self.open)

    def admit(self) -> Shape:
        """What prompts must fit.

        Raises
        ------
        Unavailable
            Nothing new is accepted now.
        """
        if self.draining:
            raise shutting_down()
        if self.nodes.shape is None:
            raise no_node("loading")
        slots = self.nodes.slots
        if not slots:
            raise no_node("lost")
        if self.unanswered() >= self.config.max_num_queued_reqs + slots:
            raise Unavailable(
                f"{self.config.max_num_queued_reqs} requests wait already.",
                code="server_overloaded",
                retry_after=2,
            )
        return self.nodes.shape

    async def follow(self, generation: Generation, origin: Origin) -> AsyncGenerator[Update]:
        """The generation's updates, with everything counted."""
        self.open[generation] = origin
        started = time.monotonic()
        try:
            async with aclosing(generation.updates()) as updates:
                async for update in updates:
                    if update.piece.finish is not None:  # before the client can go on from it
                        self.prompts.remember(*generation.reply(update.choice))
                    yield update
            if generation.report is not None:
                seconds = time.monotonic() - started
                self.metrics.succeeded(generation, generation.report, seconds)
        finally:
            for number, choice in enumerate(generation.choices):
                if choice.finish is None:  # a client that stops a reply may still keep it
                    self.prompts.remember(*generation.reply(number))
            del self.open[generation]
            self.metrics.generated(generation)

    def abort(self, name: str, tenant: str | None) -> int:
        """Ends what is called so and is the tenant's, or anybody's if it is None; how many."""
        found = [
            generation
            for generation, origin in self.open.items()
            if name in origin.names and tenant in (None, origin.tenant)
        ]
        for generation in found:
            generation.fail(Aborted(f"The request {name[:128]} was aborted."))
        return len(found)

    def forget(self, tenant: str) -> None:
        """Drops what is remembered here of a tenant's prompts and replies."""
        self.prompts.forget(tenant)
        self.last_prompts.forget(tenant)

    def check(self) -> None:
        """Proves that nodes have nothing of a response that is over."""
        placements = (one.placement for generation in self.open for one in generation.attempts)
        known = {(it.node, it.request) for it in placements if it is not None}
        for node in self.nodes:
            for number in node.requests.open:
                assert (node, number) in known, f"request {number} at {node.address} is nobody's"

    # -- the end -----------------------------------------------------------------------------------

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """While a request has come in, and its client neither has its whole answer nor is gone."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def drain(self, timeout: float) -> None:
        """Accepts nothing new and waits for what runs; what still does then gets an error."""
        self._ending = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            self.fail_all(shutting_down())

    def fail_all(self, error: ApiError) -> None:
        for generation in self.open:
            generation.fail(error)
