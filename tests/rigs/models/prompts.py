"""Prompts of real English text, cut to exact token counts: questions, and Python's own manual."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

LENGTHS = (5, 9, 15, 16, 17, 31, 33, 48, 64,
           65, 80, 100, 127, 128, 129, 200, 300, 1000)  # fmt: skip

QUESTIONS = (
    "Explain this part of the manual in simple words: ",
    "Summarise what follows in one sentence. ",
    "What would a beginner misunderstand here? ",
    "Translate into French: ",
)


def real_prompts(folder: Path, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """One prompt of ids for each length; no two begin with the same text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    manual = [topics[name] for name in sorted(topics)]
    prompts = []
    for number, length in enumerate(lengths):
        start = number * len(manual) // len(lengths)
        text = f"{number + 1}. {QUESTIONS[number % len(QUESTIONS)]}" + "\n".join(
            manual[start:] + manual[:start]
        )
        ids = tokenizer.encode(text[: 12 * length + 200], add_special_tokens=False).ids
        assert len(ids) >= length, "the text is too short"
        prompts.append(ids[:length])
    return prompts
