"""A real gateway on a real socket, in front of a decode node that says what the test wants.

The gateway runs in a thread of this process. The decode node is another thread that speaks the wire
and computes nothing: it emits forced ids, or a fixed text, one token a step.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import zmq

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.prompt.model import load_model
from kvferry.gateway.router.nodes import Nodes
from kvferry.gateway.server import HttpServer
from kvferry.gateway.service import Gateway
from kvferry.kernels.engines.standin import write_standin_model
from kvferry.kvstore.keys import unpack_tokens
from kvferry.kvstore.wire.codec import PROTOCOL, AnyMessage
from kvferry.kvstore.wire.generation import (
    Abort,
    Done,
    Generate,
    Inquire,
    PromptSources,
    Rejected,
    Running,
    Stages,
    Started,
    StepOutput,
    Stop,
    Token,
)
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.status import CacheReset, DebugReply, DebugRequest, ResetCache, Resync
from kvferry.tests.rigs.gateway import web

MAX_MODEL_LEN = 512
BYTE = 3
"""The stand-in's vocabulary: three control tokens, then the bytes."""
EOS = 2


def ids_of(text: str | bytes) -> list[int]:
    return [BYTE + byte for byte in (text.encode() if isinstance(text, str) else text)]


@dataclass
class Behaviour:
    """What the decode node does with requests; a test changes it at will."""

    pace: float = 0.0
    """Seconds a step."""
    hold: bool = False
    """Emit nothing."""
    reject: str = ""
    cached: int = 0
    """Prompt tokens that its device had; beside them those that a store had."""
    from_host: int = 0
    from_disk: int = 0
    split_done: bool = False
    """`Done` only in the step after the last token."""
    deaf: bool = False
    """Its loop is stuck: it reads nothing and says nothing, but its connections stay."""
    dies_at: int | None = None
    """It ends, without a word, when a request would get the token with this index."""
    loses: Callable[[AnyMessage], bool] = lambda message: False
    """Which of its messages never arrive."""
    ignores: Callable[[AnyMessage], bool] = lambda message: False
    """Which messages never arrive there."""
    lies: Callable[[Generate], Sequence[AnyMessage]] | None = None
    """What is said to each request, in place of running it."""
    storm: Callable[[Peer, int], Sequence[Sequence[bytes]]] | None = None
    """Frames that a peer gets with every turn; the number is the node's incarnation."""
    repeats: bool = False
    """Every message about a request arrives twice."""


@dataclass
class _Live:
    peer: Peer
    generate: Generate
    ids: list[list[int]]
    at: list[int]
    """The index of the next token, per choice."""
    ended: set[int]


class FakeDecode:
    """A decode node without an engine."""

    def __init__(
        self, address: str = "tcp://127.0.0.1:0", role: str = "decode", **fingerprint: str
    ) -> None:
        self.does = Behaviour()
        self.generates: list[Generate] = []
        self.stops: list[Stop] = []
        self.aborts: list[Abort] = []
        self.resyncs: list[Resync] = []
        self.asked: list[DebugRequest] = []
        self._live: dict[int, _Live] = {}
        self._done: dict[int, Done] = {}
        self._sayings: deque[AnyMessage] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = Server(self._context, address, new_incarnation())
        self.address = self._router.address
        identity = {"weights": "w", **fingerprint}
        self._router.open(Welcome(role, identity, 16, 64, MAX_MODEL_LEN, 16))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def emitted(self, count: int) -> bool:
        """Whether so many tokens of some choice of a live request have been sent."""
        return any(at >= count for live in list(self._live.values()) for at in live.at)

    def close(self) -> None:
        """Ends as a killed process does: without a word."""
        self._ending.set()
        self._thread.join(10)

    @property
    def dead(self) -> bool:
        return self._ending.is_set()

    def _run(self) -> None:
        next_step = 0.0
        while not self._ending.is_set():
            if self.does.deaf:
                time.sleep(0.005)
                continue
            now = time.monotonic()
            self._router.tick(now)
            for received in self._router.receive():
                if not self.does.ignores(received.message):
                    self._take(received.peer, received.message)
            while self._sayings:
                saying = self._sayings.popleft()
                for peer in list(self._router.peers.values()):
                    self._router.send(peer, saying)
            storm = self.does.storm  # the test's own thread may end it at any moment
            if storm is not None:
                for peer in list(self._router.peers.values()):
                    for frames in storm(peer, self._router.incarnation):
                        self._router._queue(frames, peer.identity)
            if now >= next_step and self._live and not self.does.hold:
                next_step = now + self.does.pace
                for live in list(self._live.values()):
                    self._step(live)
            else:
                self._router.socket.poll(2)
        self._router.close()
        self._context.destroy(linger=0)

    def _send(self, peer: Peer, message: AnyMessage) -> None:
        for _ in range(2 if self.does.repeats else 1):
            if not self.does.loses(message):
                self._router.send(peer, message)

    def _take(self, peer: Peer, message: object) -> None:
        if isinstance(message, Generate):
            self.generates.append(message)
            if self.does.reject:
                self._send(peer, Rejected(message.request, self.does.reject, "no"))
                return
            if self.does.lies is not None:
                for lie in self.does.lies(message):
                    self._send(peer, lie)
                return
            self._live[message.request] = _open(peer, message)
        elif isinstance(message, Stop):
            self.stops.append(message)
            if message.request in self._live:
                self._live[message.request].ended.add(message.choice)
                self._finish(self._live[message.request])
        elif isinstance(message, Abort):
            self.aborts.append(message)
            self._live.pop(message.request, None)
        elif isinstance(message, Inquire):
            live = self._live.get(message.request)
            if message.request in self._done:
                self._send(peer, self._done[message.request])
            elif live is None:
                self._send(peer, Rejected(message.request, "unknown_request", "no"))
            else:
                self._send(peer, Running(message.request, tuple(live.at)))
        elif isinstance(message, Resync):
            self.resyncs.append(message)
        elif isinstance(message, ResetCache):
            self._send(peer, CacheReset(message.number, 5, 2))
        elif isinstance(message, DebugRequest):
            self.asked.append(message)
            self._send(peer, DebugReply(message.number, b'{"kind": "%s"}' % message.kind.encode()))

    def _step(self, live: _Live) -> None:
        generate = live.generate
        tokens = []
        for choice, ids in enumerate(live.ids):
            if choice in live.ended:
                continue
            at = live.at[choice]
            if at == self.does.dies_at:
                self._ending.set()
                return
            token, finish = ids[at % len(ids)], ""
            if token in generate.stop_token_ids and at + 1 >= generate.min_tokens:
                finish = f"stop:{token}"
            elif token in generate.eos_ids and at + 1 >= generate.min_tokens:
                finish = "stop"
            elif at + 1 == generate.max_tokens:
                finish = "length"
            top = ((token, -0.5), (token + 1, -1.5))[: generate.sampling.logprobs or 0]
            tokens.append(Token(generate.request, choice, at, token, finish, -0.5, top))
            live.at[choice] += 1
            if finish:
                live.ended.add(choice)
        if not generate.outputs and all(token.index == 0 for token in tokens):
            self._send(live.peer, Started(generate.request, self._sources(generate)))
        if tokens:
            self._send(live.peer, StepOutput(tuple(tokens)))
        if not tokens or not self.does.split_done:
            self._finish(live)

    def _finish(self, live: _Live) -> None:
        generate = live.generate
        if len(live.ended) < generate.choices or generate.request not in self._live:
            return
        sources = self._sources(generate)
        done = Done(generate.request, sources, Stages(1, 2, 3, 4, 5, 6), 7, max(live.at), 8, 0, 0)
        self._done[generate.request] = done
        self._send(live.peer, done)
        del self._live[generate.request]

    def _sources(self, generate: Generate) -> PromptSources:
        size, does = len(generate.prompt) // 4, self.does
        new = size - does.cached - does.from_host - does.from_disk
        return PromptSources(does.cached, does.from_host, does.from_disk, prefill=new)

    def say(self, message: AnyMessage) -> None:
        """Tells every gateway something, unasked."""
        self._sayings.append(message)


def _open(peer: Peer, generate: Generate) -> _Live:
    outputs = [len(ids) // 4 for ids in generate.outputs] or [0] * generate.choices
    return _Live(peer, generate, _script(generate), outputs, set(generate.finished))


def _script(generate: Generate) -> list[list[int]]:
    if generate.forced:
        return [unpack_tokens(generate.forced)] * generate.choices
    return [[*ids_of(f"Hello {choice}"), EOS] for choice in range(generate.choices)]


@dataclass
class Rig:
    """A gateway and its decode node."""

    decode: FakeDecode
    gateway: Gateway
    url: str
    port: int

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return web.post(self.url + path, json=body, timeout=20, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return web.get(self.url + path, timeout=20, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"messages": messages} | fields)

    def idle(self) -> bool:
        return not self.gateway.unanswered() and not any(
            node.requests.open for node in self.gateway.nodes
        )


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Waits, and says for how long."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen"
        time.sleep(0.005)
    return time.monotonic() - start


@contextmanager
def running(
    folder: Path, decode: FakeDecode | None = None, *, wait: bool = True, **settings: Any
) -> Iterator[Rig]:
    """A gateway over a stand-in model that is written into `folder`, once it is ready."""
    write_standin_model(folder)
    node = FakeDecode() if decode is None else decode
    base = GatewayConfig(model=str(folder), cache_dir=folder, enable_test_hooks=True)
    config = replace(base, **({"decode_node": (node.address,)} | settings))
    model = load_model(config, print)
    ready = threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hello = Hello(PROTOCOL, "gateway", {"tokenizer": model.tokenizer_digest})
    nodes = Nodes(
        context,
        config.decode_node,
        config.prefill_node,
        config.store_node,
        hello,
        new_incarnation(),
        ready.set,
    )
    gateway = Gateway(config, model, nodes)
    server = HttpServer(gateway)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert not wait or ready.wait(60)
        yield Rig(node, gateway, f"http://127.0.0.1:{port}", port)
    finally:
        server.should_exit = True
        thread.join(10)
        node.close()
        context.destroy(linger=0)
        listener.close()


@contextmanager
def several(
    folder: Path, count: int = 2, **settings: Any
) -> Iterator[tuple[Rig, list[FakeDecode]]]:
    """A gateway in front of so many decode nodes; the first request goes to the first one."""
    with ExitStack() as stack:
        nodes = [FakeDecode() for _ in range(count)]
        for node in nodes[1:]:
            stack.callback(node.close)
        addresses = tuple(node.address for node in nodes)
        rig = stack.enter_context(running(folder, nodes[0], decode_node=addresses, **settings))
        yield rig, nodes
        wait_until(rig.idle)
        rig.gateway.nodes.check()
        rig.gateway.check()
