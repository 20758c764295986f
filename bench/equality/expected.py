"""What plain `transformers` generates for each prompt, remembered on disk.

Owns the memory: one file a model, an entry a prompt, so that only the first run computes. The
oracle is float32 with transformers' own attention and its own cache, in this process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from kvferry.kvstore.process.model_files import content_digest
from kvferry.tests.rigs.models.oracle import Greedy, greedy, load_oracle

Progress = Callable[[str], None]


def expected(
    folder: Path, cache_dir: Path, prompts: Sequence[Sequence[int]], tokens: int, progress: Progress
) -> list[Greedy]:
    """The greedy continuation of every prompt, with its margins."""
    memory = _Memory(cache_dir / "oracle" / f"{content_digest(folder, cache_dir)}.json")
    names = [_name(prompt, tokens) for prompt in prompts]
    missing = [at for at, name in enumerate(names) if name not in memory.entries]
    if missing:
        progress(f"oracle: {len(missing)} of {len(prompts)} prompts to compute; loading the model")
        model = load_oracle(folder)
        for done, at in enumerate(missing, 1):
            memory.add(names[at], greedy(model, prompts[at], tokens))
            progress(f"oracle: {done} of {len(missing)}, {len(prompts[at])} tokens")
    return [memory.entries[name] for name in names]


class _Memory:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_bytes())
        except (OSError, ValueError):
            known = {}
        self.entries = {name: Greedy(*entry) for name, entry in known.items()}

    def add(self, name: str, result: Greedy) -> None:
        self.entries[name] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            json.dump(self.entries, file)
        os.replace(file.name, self._path)


def _name(prompt: Sequence[int], tokens: int) -> str:
    said = json.dumps([version("transformers"), version("torch"), tokens, list(prompt)])
    return blake2b(said.encode(), digest_size=16).hexdigest()
