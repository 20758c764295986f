"""What the gateway knows of the model it serves: its text side.

Owns the reading of a model folder into one value: tokenizer, chat template, end-of-sequence ids,
vocabulary size and the author's recommended sampling. It never reads a weight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import NotFound
from kvferry.gateway.params import Vocabulary
from kvferry.gateway.prompt.chat_template import ChatTemplate, load_template
from kvferry.gateway.tokenizer.tokenizer import Tokenizer, load_tokenizer
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.model_files import eos_token_ids, resolve_model, tokenizer_digest

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]
    """What clients may call it; the first is what answers say."""
    tokenizer: Tokenizer
    tokenizer_digest: str
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    vocabulary: Vocabulary
    created: int

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """NotFound unless this is what the model may be called."""
        if name is not None and name not in self.names:
            raise NotFound(
                f"The model {name[:100]!r} does not exist; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )


def load_model(config: GatewayConfig, progress: Callable[[str], None]) -> ServedModel:
    """The model of a config; ConfigError when its folder cannot be used."""
    files = resolve_model(config.model, config.cache_dir, progress)
    folder, tokenizer = files.folder, load_tokenizer(files.folder)
    settings = _json_object(folder / "config.json")
    size = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    return ServedModel(
        names=config.served_model_name or (files.name,),
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(folder),
        template=load_template(folder, config.chat_template),
        eos_ids=eos_token_ids(folder),
        vocabulary=Vocabulary(
            size if isinstance(size, int) else tokenizer.size,
            _recommended(_json_object(folder / "generation_config.json")),
        ),
        created=int(time.time()),
    )


def _recommended(generation: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(generation[name])
        for name in _RECOMMENDED
        if isinstance(generation.get(name), int | float)
    }


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
