"""A whole hand-off in one thread: a decode node, prefill nodes and a gateway, turned by hand.

Real sockets and real nodes over the stand-in engine; only the processes are missing. So a test
sees every state between two turns, and `check()` proves all ledgers after each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import zmq

from kvferry.decode_node.node import DecodeLimits, DecodeNode
from kvferry.kernels.engines.standin import StandinConfig, StandinEngine, standin_reply
from kvferry.kvstore.client.client import StoreClient, Transfer
from kvferry.kvstore.keys import chain, pack_tokens, root_key
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.store.node import StoreNode
from kvferry.kvstore.store.storage import StoreSizes
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.generation import (
    Done,
    Generate,
    PromptSources,
    Rejected,
    Sampling,
    Started,
    StepOutput,
    Token,
)
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.prefill_node.node import PrefillNode

BLOCK = 16
GREEDY = Sampling(temperature=0.0)
STANDIN = StandinConfig(vocab_size=300, max_position_embeddings=8192)
FINGERPRINT = {"weights": "w1", "block_size": str(BLOCK)}
DECODE_LIMITS = DecodeLimits(
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_queued=256,
    local_prefill=128,
    reuse=True,
    forced_ids=True,
    load_patience_s=30.0,
)
PATIENCE_S = 30.0
"""Of fetches: a busy machine shall not change what is counted."""


@dataclass
class Answer:
    """Everything that came back for one request."""

    tokens: dict[int, list[Token]] = field(default_factory=dict)
    started: list[tuple[int, PromptSources]] = field(default_factory=list)
    """Accounts before the first token, and how many choices had tokens then."""
    done: Done | None = None
    rejected: Rejected | None = None

    @property
    def ended(self) -> bool:
        return self.done is not None or self.rejected is not None

    def ids(self, choice: int = 0) -> list[int]:
        return [token.token for token in self.tokens.get(choice, [])]

    def finish(self, choice: int = 0) -> str:
        return self.tokens[choice][-1].finish

    @property
    def cached(self) -> int:
        assert self.done is not None
        sources = self.done.sources
        return sources.hits


class Cluster:
    """One decode node, `prefill_nodes` prefill nodes, one gateway."""

    living: ClassVar[list[Cluster]] = []
    """What a failed test leaves open is closed after it, and spoils no other test."""
    usual_store: ClassVar[StoreSizes | None] = None
    """Of clusters that are made without saying."""

    def __init__(
        self,
        prefill_nodes: int = 1,
        *,
        config: StandinConfig = STANDIN,
        decode_blocks: int = 1024,
        prefill_blocks: int = 1024,
        limits: DecodeLimits = DECODE_LIMITS,
        prefill_reuse: bool = True,
        store: StoreSizes | None = None,
        transfer: Transfer = "auto",
        prefill_store: StoreSizes | Literal["same", "none"] = "same",
    ) -> None:
        self.config = config
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.store: StoreNode | None = None
        self._transfer = transfer
        self.other_store: StoreNode | None = None
        """Of the prefill nodes, if they are on another host."""
        self._same_store = prefill_store == "same"
        store = store or self.usual_store
        if store is not None:
            self.start_store(store)
        if isinstance(prefill_store, StoreSizes):
            self.other_store = self._new_store(prefill_store)
        self.root = root_key(FINGERPRINT, "default", None)
        self.prefill_engines = [self._engine(prefill_blocks) for _ in range(prefill_nodes)]
        self.prefill = [
            PrefillNode(engine, self._server("prefill", engine), 512, max_queued=64,
                        reuse=prefill_reuse, store=self._store_client("prefill"),
                        load_patience_s=PATIENCE_S)
            for engine in self.prefill_engines
        ]  # fmt: skip
        self.addresses = [node._server.address for node in self.prefill]
        self.engine = self._engine(decode_blocks)
        self._incarnation = new_incarnation()
        server = self._server("decode", self.engine)
        self.decode = DecodeNode(
            self.engine,
            server,
            lambda address: self.client(address, "decode"),
            limits,
            store=self._store_client("decode"),
        )
        self.gateway = self.client(server.address, "gateway")
        self.answers: dict[int, Answer] = {}
        self._next = 1
        self.living.append(self)
        self.until(lambda: self.gateway.state is LinkState.READY)

    def _engine(self, blocks: int) -> StandinEngine:
        return StandinEngine(self.config, block_size=BLOCK, num_blocks=blocks)

    def _server(self, role: str, engine: StandinEngine) -> Server:
        server = Server(self.context, "tcp://127.0.0.1:0", new_incarnation())
        spec = engine.spec
        server.open(Welcome(role, FINGERPRINT, BLOCK, spec.num_blocks, spec.max_model_len, 16))
        return server

    def client(self, address: str, role: str) -> Client:
        fingerprint = FINGERPRINT if role == "decode" else {}
        return Client(self.context, address, Hello(PROTOCOL, role, fingerprint), new_incarnation())

    def start_store(self, sizes: StoreSizes, listen: str = "tcp://127.0.0.1:0") -> None:
        self.sizes = sizes
        self.store = self._new_store(sizes, listen)

    def _new_store(self, sizes: StoreSizes, listen: str = "tcp://127.0.0.1:0") -> StoreNode:
        server = Server(self.context, listen, new_incarnation())
        return StoreNode(server, sizes, debug=DebugSwitches(True, True))

    def stop_store(self, *, drain: bool) -> str:
        """Ends the store, and says where it was."""
        assert self.store is not None
        address = self.store._server.address
        if drain:
            self.until(lambda: self.unwritten() == 0)
        self.store.close()
        self.store._server.close()
        self.store = None
        return address

    def unwritten(self) -> float:
        return 0.0 if self.store is None else self.store.figures().get("unwritten_bytes", 0.0)

    def kill_prefill(self, node: PrefillNode) -> None:
        """What the end of its process leaves: closed sockets, and no mapping of the arena."""
        node._server.close()
        node.close()

    def new_prefill(self, engine: StandinEngine, server: Server) -> PrefillNode:
        return PrefillNode(
            engine,
            server,
            512,
            max_queued=64,
            reuse=True,
            store=self._store_client("prefill"),
            load_patience_s=PATIENCE_S,
        )

    def _store_client(self, role: str) -> StoreClient | None:
        store = self.store if self._same_store or role == "decode" else self.other_store
        if store is None:
            return None
        address = store._server.address
        block_bytes = self.prefill_engines[0].spec.block_bytes if self.prefill_engines else 0
        block_bytes = block_bytes or self._engine(1).spec.block_bytes
        hello = Hello(PROTOCOL, role, FINGERPRINT)
        return StoreClient(
            lambda: Client(self.context, address, hello, new_incarnation()),
            block_bytes,
            transfer=self._transfer,
        )

    # -- driving --------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[DecodeNode | PrefillNode]:
        return [self.decode, *self.prefill]

    def turn(self, without: DecodeNode | PrefillNode | None = None) -> None:
        """One turn of everybody, and every invariant after it."""
        self.gateway.tick(time.monotonic())
        for received in self.gateway.receive():
            self._collect(received.message)
        for node in self.nodes:
            if node is not without:
                node.turn()
        for store in self._stores:
            store.turn()
        self.check(without)

    def check(self, without: DecodeNode | PrefillNode | None = None) -> None:
        for node in self.nodes:
            if node is not without:
                node.check()
        for store in self._stores:
            store.check()

    @property
    def _stores(self) -> list[StoreNode]:
        return [it for it in (self.store, self.other_store) if it is not None]

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "nothing happened for too long"
            self.turn()

    def _collect(self, message: object) -> None:
        match message:
            case StepOutput(tokens):
                for token in tokens:
                    answer = self.answers[token.request]
                    row = answer.tokens.setdefault(token.choice, [])
                    assert token.index == len(row), "a token is missing or came twice"
                    row.append(token)
            case Started():
                answer = self.answers[message.request]
                answer.started.append((len(answer.tokens), message.sources))
            case Done():
                self.answers[message.request].done = message
            case Rejected():
                self.answers[message.request].rejected = message

    # -- requests -------------------------------------------------------------------------------

    def message(self, prompt: Sequence[int], /, **changes: object) -> Generate:
        """A greedy `Generate` of 16 tokens; `changes` replace its fields."""
        base = Generate(
            request=self._next,
            prompt=pack_tokens(prompt),
            root=self.root,
            keys=b"".join(chain(self.root, prompt, BLOCK)),
            max_tokens=16,
            min_tokens=0,
            eos_ids=(),
            stop_token_ids=(),
            sampling=GREEDY,
            seed=1,
            choices=1,
            prefill_nodes=tuple(self.addresses),
        )
        self._next += 1
        fields = {name: getattr(base, name) for name in base.__struct_fields__}
        return Generate(**{**fields, **changes})

    def submit(self, message: Generate) -> Answer:
        answer = self.answers[message.request] = Answer()
        assert self.gateway.send(message)
        return answer

    def ask(self, prompt: Sequence[int], /, **changes: object) -> Answer:
        """Runs one request to its end."""
        answer = self.submit(self.message(prompt, **changes))
        self.until(lambda: answer.ended)
        return answer

    def reply(self, prompt: Sequence[int], count: int = 16) -> list[int]:
        """What the answer must be."""
        return standin_reply(prompt, self.config, count)

    def idle(self) -> bool:
        """Whether no block is held and no transfer is known anywhere."""
        return (
            self.decode.pool.num_held == 0
            and self.decode.receiver.transfers.num_live == 0
            and self.decode.receiver.transfers.num_draining == 0
            and all(node.pool.num_held == 0 for node in self.prefill)
        )

    def close(self) -> None:
        self.living.remove(self)
        self.gateway.close()
        self.decode.close()
        self.decode._server.close()
        for node in self.prefill:
            node.close()
            node._server.close()
        if self.store is not None:
            self.stop_store(drain=False)
        if self.other_store is not None:
            self.other_store.close()
        self.context.destroy(0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Ids that differ between seeds from the first one on."""
    return [(seed * 7919 + index * 31 + index // 7) % 290 for index in range(length)]


def without_prefill(limits: DecodeLimits = DECODE_LIMITS, **changes: int) -> DecodeLimits:
    return replace(limits, **changes)  # type: ignore[arg-type]
