"""What the nodes say of a whole response: where its prompt tokens came from, where time went.

Owns the sums over the requests that a response is made of. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.kvstore.wire.generation import Done, PromptSources, Stages


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

    def total(name: str) -> int:
        return sum(getattr(item.sources, name) for item in done)

    sources = PromptSources(
        device=total("device"),
        host=total("host"),
        disk=total("disk"),
        remote=total("remote"),
        prefill=total("prefill"),
        decode=total("decode"),
    )
    hits = sources.device + sources.host + sources.disk + sources.remote
    return Report(
        sources=sources,
        stages=max((item.stages for item in done), key=_waited),
        handoff_ms=max(item.handoff_ms for item in done),
        predicted_ms=max(item.predicted_ms for item in done),
        cached_tokens=max(0, min(hits, prompt_tokens - len(done))) if vouched else None,
    )


def _waited(stages: Stages) -> float:
    return (
        stages.queue
        + stages.lookup
        + stages.load
        + stages.prefill
        + stages.transfer
        + stages.first_step
    )
