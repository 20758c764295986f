"""The running gateway as one value: what it serves, with which nodes, and whether it still does.

Owns the state that outlives a request: the nodes, the open generations, the drain. It accepts or
refuses work as a whole and follows each generation to its end; it knows no path and no body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from threading import Barrier

from kvferry.gateway.apart import Apart
from kvferry.gateway.auth import Keys
from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import ApiError, Unavailable, shutting_down
from kvferry.gateway.generate import Generation, Patience, Update, no_node
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.model import ServedModel
from kvferry.gateway.nodes import Nodes, NoNode
from kvferry.gateway.pacing import Turnstile
from kvferry.gateway.parameters import Params
from kvferry.gateway.prompts import Prompt, PromptMaker, Shape
from kvferry.gateway.reading import Reader

TOKENIZER_THREADS = 2
REQUESTS_A_TURN = 4
"""How many requests may begin in one turn of the event loop."""


class Gateway:
    """Everything a request handler needs."""

    def __init__(self, config: GatewayConfig, model: ServedModel, nodes: Nodes) -> None:
        self.config = config
        self.model = model
        self.nodes = nodes
        self.keys = Keys(config.api_key)
        self.admin_keys = Keys((config.admin_api_key,) if config.admin_api_key else ())
        self.metrics = Metrics(model.name, nodes, self.unanswered)
        nodes.on_lag = self.metrics.lagged
        self._executor = _all_threads(ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer"))
        self.prompts = PromptMaker(model, self._executor)
        self.turnstile = Turnstile(REQUESTS_A_TURN)
        self.reader = Reader(
            model, self.prompts, self._executor, test_hooks=config.enable_test_hooks
        )
        self.apart = Apart(config)
        self.draining = False
        self.open: set[Generation] = set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        self.nodes.close()
        self.apart.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

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
            raise no_node(NoNode("loading"))
        if not self.nodes.ready:
            raise no_node(NoNode("lost"))
        if self.unanswered() >= self.config.max_num_queued_reqs + self.nodes.slots:
            raise Unavailable(
                f"{self.config.max_num_queued_reqs} requests wait already.",
                code="server_overloaded",
                retry_after=2,
            )
        return self.nodes.shape

    def generation(self, prompts: Sequence[Prompt], params: Params) -> Generation:
        """A response to be followed."""
        config = self.config
        patience = Patience(
            config.first_token_timeout, config.request_timeout, config.resume_timeout
        )
        return Generation(self.nodes, self.model, prompts, params, patience)

    async def follow(self, generation: Generation) -> AsyncGenerator[Update]:
        """The generation's updates, with everything counted."""
        self.open.add(generation)
        started = time.monotonic()
        try:
            async with aclosing(generation.updates()) as updates:
                async for update in updates:
                    yield update
            if generation.report is not None:
                seconds = time.monotonic() - started
                self.metrics.succeeded(generation, generation.report, seconds)
        finally:
            self.open.discard(generation)
            self.metrics.generated(generation)

    def check(self) -> None:
        """Proves that nodes have nothing of a response that is over."""
        runs = {(run.node, run.request) for one in self.open for run in one.runs}
        for node in self.nodes:
            for number in node.requests:
                assert (node, number) in runs, f"request {number} at {node.address} is nobody's"

    # -- the end -----------------------------------------------------------------------------------

    def began(self) -> None:
        """A request has come in."""
        self._in_flight += 1
        self._idle.clear()

    def ended(self) -> None:
        """A request has its whole answer, or its client is gone."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def drain(self, timeout: float) -> None:
        """Accepts nothing new and waits for what runs; what still does then gets an error."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            self.fail_all(shutting_down())

    def fail_all(self, error: ApiError) -> None:
        for generation in self.open:
            generation.fail(error)


def _all_threads(executor: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """Starts every thread now, so that the process has as many later as at the start."""
    together = Barrier(TOKENIZER_THREADS)
    for _ in range(TOKENIZER_THREADS):
        executor.submit(together.wait)
    return executor
