"""Everything for which a decode node refuses a request on arrival, before it holds anything."""

from __future__ import annotations

from kvferry.decode_node.request import Request
from kvferry.decode_node.scheduler import DecodeScheduler
from kvferry.kernels.engine import EngineSpec

Refusal = tuple[str, str]
"""A code of `Rejected`, and a sentence that names the figures."""


def refusal(request: Request, spec: EngineSpec, scheduler: DecodeScheduler) -> Refusal | None:
    """Why this request can never run here; None when it can."""
    prompt = len(request.prompt)
    if prompt + request.message.max_tokens > spec.max_model_len:
        return (
            "context_length_exceeded",
            f"This model's maximum context length is {spec.max_model_len} tokens. However, your "
            f"prompt has {prompt} tokens and max_tokens is {request.message.max_tokens}.",
        )
    ids = [*request.prompt, *request.forced, *request.message.eos_ids]
    ids += request.message.stop_token_ids
    ids += [token for token, _ in request.params.logit_bias]
    for output in request.outputs.values():
        ids += output
    if not 0 <= min(ids) <= max(ids) < spec.vocab_size:
        return "invalid_request", f"a token id is outside the vocabulary of {spec.vocab_size}"
    if len(request.keys) != prompt // spec.block_size:
        return "invalid_request", f"{len(request.keys)} block keys for {prompt} tokens"
    never = scheduler.never_fits(request)
    return ("invalid_request", never) if never else None
