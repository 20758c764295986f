"""What transformers itself generates with its own cache, and the rule by which texts are compared.

Arithmetic may differ between two ways of computing the same thing, so a difference counts only
where the oracle was not undecided itself: where its two best logits are further apart than
`TIE`. What comes after a tie is another text and cannot be compared. Torch and transformers, which
take seconds to import, are imported by whoever asks the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TIE = 1e-3


class Greedy(NamedTuple):
    tokens: list[int]
    margins: list[float]
    """How far the best logit lay above the second, at each token."""


class Verdict(NamedTuple):
    equal: bool
    """No difference counts."""
    tie_at: int | None
    """Where the texts parted at a tie; nothing behind it was compared."""
    wrong_at: int | None


def load_oracle(folder: Path) -> Any:
    """The model as plain transformers loads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def greedy(model: Any, ids: Sequence[int], n: int) -> Greedy:
    """The `n` best tokens after `ids`, whatever they are: an end of sequence does not stop it."""
    import torch

    tokens: list[int] = []
    margins: list[float] = []
    cache = None
    new = list(ids)
    for _ in range(n):
        with torch.inference_mode():
            result = model(torch.tensor([new]), cache=cache, use_cache=True, logits_to_keep=1)
        cache = result.cache
        best = result.logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        new = [int(best.indices[0])]
        tokens += new
    return Greedy(tokens, margins)


class Judge:
    """Says whether texts are the oracle's greedy ones, by one uncached pass over each.

    A text is greedy exactly when every token of it is the best one after all before it, so the
    oracle need not generate it again.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}

    def __call__(self, prompt: Sequence[int], got: Sequence[int]) -> Verdict:
        asked = (tuple(prompt), tuple(got))
        if asked not in self._seen:
            self._seen[asked] = self._judge(*asked)
        return self._seen[asked]

    def _judge(self, prompt: tuple[int, ...], got: tuple[int, ...]) -> Verdict:
        import torch

        ids = torch.tensor([[*prompt, *got[:-1]]])
        with torch.inference_mode():
            logits = self._model(ids, use_cache=False, logits_to_keep=len(got)).logits[0]
        best = logits.topk(2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return agree(best.indices[:, 0].tolist(), margins, got)


def logits_at(model: Any, ids: Sequence[int], lengths: Sequence[int]) -> NDArray[np.float32]:
    """The logits after the first n of `ids` for every n of `lengths`, from one uncached pass."""
    import torch

    rows = torch.tensor([length - 1 for length in lengths])
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=rows).logits[0]
    return np.asarray(logits.float().numpy())


def agree(expected: Sequence[int], margins: Sequence[float], got: Sequence[int]) -> Verdict:
    """Compares `got` with the oracle's tokens; a shorter `got` is compared as far as it goes."""
    for at, (want, margin, have) in enumerate(zip(expected, margins, got, strict=False)):
        if want != have:
            tie = margin < TIE
            return Verdict(tie, at if tie else None, None if tie else at)
    return Verdict(True, None, None)
