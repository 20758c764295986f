"""`kvferry keys DIR`: makes a cluster's CURVE keys.

Owns nothing but the words; what the files are is `curve`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.settings import parse, positional
from kvferry.kvstore.wire.curve import NAMES, make_keys


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """`kvferry keys`."""

    keys_dir: Path | None = positional(None, "where to write the keys")


def run(argv: Sequence[str]) -> int:
    config = parse(
        KeysConfig,
        argv,
        os.environ,
        prog="kvferry keys",
        description="Makes the keys that let the processes of one cluster, and nobody else, "
        "connect to each other: copy the folder to every host, and give --curve-keys DIR.",
    )
    if config.keys_dir is None:
        raise ConfigError("no folder: kvferry keys DIR")
    make_keys(config.keys_dir)
    print(f"wrote {', '.join(NAMES)} to {config.keys_dir}: copy the folder to every host")
    return 0
