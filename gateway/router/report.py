"""What is known of a whole response: where its prompt tokens came from, where time went.

Owns the sums over the requests that a response is made of, what counts of an account that is not
the first one's, and when tokens reached the gateway. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import astuple

from kvferry.kvstore.wire.generation import Done, PromptSources, Stages


@dataclass(slots=True)
class Timeline:
    """When tokens reached the gateway, on the monotonic clock."""

    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between a choice's successive tokens, not yet taken by the metrics."""
    last_of: dict[int, float] = field(default_factory=dict)
    """When each choice got its last token."""

    @property
    def ttft(self) -> float | None:
        return self.first - self.submitted if self.first else None

    def token(self, choice: int, now: float) -> None:
        """A choice has got its next token."""
        self.first = self.first or now
        if choice in self.last_of:
            self.gaps.append(now - self.last_of[choice])
        self.last = self.last_of[choice] = now


@dataclass(frozen=True, slots=True)
class Report:
    """The account of a response."""

    sources: PromptSources
    stages: Stages
    """Of the prompt that waited longest."""
    handoff_ms: float
    predicted_ms: float
    cached_tokens: int | None
    """Prompt tokens not recomputed thanks to earlier requests; None: nobody can say any more."""


def make_report(done: Sequence[Done], prompt_tokens: int, *, vouched: bool) -> Report:
    """The sums of one account a prompt; not `vouched`: one of them is made up."""
    by_source = zip(*(astuple(item.sources) for item in done), strict=True)
    sources = PromptSources(*map(sum, by_source))
    return Report(
        sources=sources,
        stages=max((item.stages for item in done), key=lambda stages: sum(astuple(stages))),
        handoff_ms=max(item.handoff_ms for item in done),
        predicted_ms=max(item.predicted_ms for item in done),
        cached_tokens=max(0, min(sources.hits, prompt_tokens - len(done))) if vouched else None,
    )


def without_own(sources: PromptSources, known: int) -> PromptSources:
    """The same sum with at most `known` hits: the others were computed for this request.

    A node that was not the first may find what this very request had computed before: hits count
    only as far as they were known of when the request came.
    """
    device = min(sources.device, known)
    host = min(sources.host, known - device)
    disk = min(sources.disk, known - device - host)
    remote = min(sources.remote, known - device - host - disk)
    own = sources.hits - (device + host + disk + remote)
    return PromptSources(device, host, disk, remote, sources.prefill, sources.decode + own)
