"""What the decode node knows of a request and of each sequence it runs for it.

Owns plain state and the rules by which a choice ends; it holds no blocks of its own account (the
scheduler moves block numbers in and out) and sends nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvferry.kernels.sampling import SamplingParams
from kvferry.kvstore.keys import chain, split_keys, unpack_tokens
from kvferry.kvstore.wire.generation import Generate, PromptSources, Stages
from kvferry.kvstore.wire.handoff import Accepted
from kvferry.kvstore.wire.server import Peer


class Phase(Enum):
    """The life of a sequence.

    WAITING ─► FETCHING ─► RECEIVING ─► PREFILLING ─► DECODING ─► ENDED
       │  └───────┴───────────┴────────────►┘             │
       └◄──────────────────── preempted ──────────────────┘

    WAITING holds nothing. FETCHING waits for blocks of the store, RECEIVING for shipped ones.
    PREFILLING computes what is left of its tokens here, at least the last one, whose logits choose
    the next. ENDED holds nothing.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    RECEIVING = "receiving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True)
class Timeline:
    """Readings of this process's monotonic clock in a request's first life; 0: not reached."""

    arrived: float
    admitted: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    """What went by while blocks came from the store."""
    shipped_from: float = 0.0
    """When the prefill node's last chunk ended, on our clock; 0 without one."""
    first_step: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def stages(self) -> Stages:
        """Disjoint intervals from arrival to the first token, in ms."""
        if not self.first_token:
            return Stages()
        between = max(0.0, self.first_step - self.admitted)
        transfer = min(self.handoff_s, between)
        load = min(self.load_s, between - transfer)
        return Stages(
            queue=1e3 * max(0.0, self.admitted - self.arrived - self.lookup_s),
            lookup=1e3 * self.lookup_s,
            load=1e3 * load,
            prefill=1e3 * (between - transfer - load),
            transfer=1e3 * transfer,
            first_step=1e3 * (self.first_token - self.first_step),
        )

    @property
    def handoff_s(self) -> float:
        """From the end of the prefill node's last chunk to the start of the first step."""
        if not self.shipped_from:
            return 0.0
        # The reading is the prefill node's: it counts only as far as it can be true.
        return max(0.0, self.first_step - max(self.shipped_from, self.arrived))


@dataclass(slots=True)
class Request:
    """One `Generate`, its clock and its counts."""

    peer: Peer
    message: Generate
    timeline: Timeline
    prompt: list[int]
    keys: list[bytes]
    """Keys of the prompt's whole blocks."""
    params: SamplingParams
    forced: list[int]
    unfinished: set[int]
    """Choices that have not ended."""
    outputs: dict[int, list[int]]
    sources: PromptSources = field(default_factory=PromptSources)
    bytes_shipped: int = 0
    preemptions: int = 0
    overrun: int = 0

    @property
    def order(self) -> tuple[int, float]:
        """Lower runs first and is preempted last."""
        return (self.message.priority, self.timeline.arrived)

    @property
    def key(self) -> tuple[bytes, int]:
        """What tells it from all others: whose it is, and the number it has there."""
        return (self.peer.identity, self.message.request)

    def token_ids(self) -> list[int]:
        """Every id that it names, wherever."""
        biased = [token for token, _ in self.params.logit_bias]
        ids = [*self.prompt, *self.forced, *biased]
        ids += self.message.eos_ids + self.message.stop_token_ids
        return [*ids, *(token for output in self.outputs.values() for token in output)]

    def finish_reason(self, choice: int, token: int) -> str:
        """Why `token`, just appended to the choice's output, is its last; empty if it is not."""
        count = len(self.outputs[choice])
        if count > self.message.min_tokens:
            if token in self.message.eos_ids:
                return "stop"
            if token in self.message.stop_token_ids:
                return f"stop:{token}"
        return "length" if count >= self.message.max_tokens else ""


def open_request(peer: Peer, message: Generate, now: float) -> Request:
    """Unpacks a `Generate`; ValueError when its parts contradict each other."""
    sampling = message.sampling
    resumed = {
        choice: unpack_tokens(packed) for choice, packed in enumerate(message.outputs) if packed
    }
    if len(message.outputs) > message.choices:
        raise ValueError(f"{len(message.outputs)} outputs for {message.choices} choices")
    outputs = {choice: resumed.get(choice, []) for choice in range(message.choices)}
    unfinished = set(outputs) - set(message.finished)
    if not unfinished:
        raise ValueError("every choice has finished")
    if any(len(outputs[choice]) >= message.max_tokens for choice in unfinished):
        raise ValueError(f"an unfinished choice has its {message.max_tokens} tokens already")
    prompt = unpack_tokens(message.prompt)
    if not prompt:
        raise ValueError("the prompt is empty")
    return Request(
        peer=peer,
        message=message,
        timeline=Timeline(arrived=now),
        prompt=prompt,
        keys=split_keys(message.keys),
        params=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=sampling.logit_bias,
            min_tokens=message.min_tokens,
            logprobs=sampling.logprobs,
        ),
        forced=unpack_tokens(message.forced),
        unfinished=unfinished,
        outputs=outputs,
    )


@dataclass(slots=True)
class BlockSources:
    """Where the leading blocks of a sequence came from, each counted once.

    A sequence may get a block twice: when a transfer fails, or after a preemption. It is a hit only
    if some *earlier* request left it behind.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    prefill: int = 0
    counted: int = 0
    """Blocks attributed so far."""
    asked: Accepted | None = None
    """What the prefill node had when first asked; what it has later, it has from this request."""
    brought: int = 0
    """Blocks counted that the prefill node had from its disk."""

    def found(self, reached: int) -> None:
        """At admission the pool had this many leading blocks."""
        if self.asked is None and not self.counted:
            self.device = self.counted = reached

    def fetched(self, first: int, reached: int, disk: int) -> None:
        """Blocks `[first, reached)` came from the store, so many of them from its disk.

        Once a prefill node was asked, what it had not had before may be in the store by this
        request alone: no hit.
        """
        start = max(first, self.counted)
        fresh = max(0, reached - start)
        own = 0 if self.asked is None else max(0, reached - max(start, self.asked.prefix))
        self.prefill += own
        self.disk += min(disk, fresh - own)
        self.host += fresh - own - min(disk, fresh - own)
        self.counted = max(self.counted, reached)

    def shipped(self, first: int, reached: int, accepted: Accepted | None) -> None:
        """Blocks `[first, reached)` arrived, of which the prefill node had some already.

        None: it never said so, and nothing arrived. Whoever is asked next may have some.
        """
        if accepted is None:
            return
        if self.asked is None:
            self.asked = accepted
        start = max(first, self.counted)
        if reached > start:
            known = min(accepted.prefix, self.asked.prefix, reached)
            stored_from = self.asked.prefix - self.asked.host - self.asked.disk
            stored = max(0, known - max(start, stored_from))
            disk = min(stored, self.asked.disk - self.brought)
            self.device += max(0, known - start - stored)
            self.host += stored - disk
            self.disk += disk
            self.brought += disk
            self.prefill += reached - max(start, known)
            self.counted = reached

    def computed(self, reached: int) -> None:
        """Whatever lies before this block and was not attributed was computed here."""
        self.counted = max(self.counted, reached)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens that grow in one block table: all choices until the first step, then one each."""

    request: Request
    choices: list[int]
    tokens: list[int]
    keys: list[bytes]
    """Keys of the whole blocks of `tokens` known so far."""
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose keys and values are in the blocks."""
    spare: list[int] = field(default_factory=list)
    """Blocks reserved at admission for the forks and for growth."""
    attempts: Counter[str] = field(default_factory=Counter)
    """How often each prefill node was asked for its blocks."""
    inline: bool = False
    """A slot of the arena was not what it should be: its blocks shall come as bytes."""
    awaited: bytes = b""
    """Key of the block that another sequence was computing when this one was last looked at."""
    sources: BlockSources = field(default_factory=BlockSources)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


def prompt_sources(sequence: Sequence, block_size: int) -> PromptSources:
    """Where the prompt came from, when its first token is known; whatever nobody shipped or had
    was computed here. A resumed sequence may have got more than the prompt: the rest is cut."""
    length = len(sequence.request.prompt)
    found = sequence.sources
    device = min(found.device * block_size, length - 1)
    host = min(found.host * block_size, length - 1 - device)
    disk = min(found.disk * block_size, length - 1 - device - host)
    cached = device + host + disk
    prefill = min(found.prefill * block_size, length - cached)
    return PromptSources(
        device=device, host=host, disk=disk, prefill=prefill, decode=length - cached - prefill
    )


def open_sequences(request: Request, block_size: int) -> list[Sequence]:
    """One sequence for all choices of a fresh request; one each for a resumed one."""
    if not any(request.outputs.values()):
        choices = sorted(request.unfinished)
        return [Sequence(request, choices, list(request.prompt), list(request.keys))]
    root = request.message.root
    resumed = {
        choice: request.prompt + request.outputs[choice] for choice in sorted(request.unfinished)
    }
    return [
        Sequence(request, [choice], tokens, list(chain(root, tokens, block_size)))
        for choice, tokens in resumed.items()
    ]
