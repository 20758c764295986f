"""The settings of `kvferry serve`: its own, and those of the roles that it hands on.

Owns what only somebody who starts all roles can be told: how many there are, on which cores, and
what they have a joint default for. Every other flag is a role's own and told in its config class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.gateway.config import GatewayConfig
from kvferry.kvstore.node.config import DecodeConfig, PrefillConfig
from kvferry.kvstore.process.settings import flag, flags_of
from kvferry.kvstore.store.config import StoreConfig


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All roles on one host."""

    decode_nodes: int = flag(1, "how many nodes generate tokens", minimum=1, metavar="N")
    prefill_nodes: int | None = flag(
        None, "0: decode nodes prefill by themselves [1; on one core 0]", minimum=0, metavar="N"
    )
    decode_cores: str | None = flag(None, "cores of decode nodes: 0,2 or 0-3 [the first half]")
    prefill_cores: str | None = flag(None, "cores of prefill nodes, at low priority [all]")
    max_num_queued_reqs: int = flag(
        256, "requests that may wait beyond those that run at once", minimum=1, metavar="N"
    )
    store_dir: Path | None = flag(
        None, "where blocks outlive a restart [blocks in --cache-dir]", metavar="DIR"
    )
    gateway: GatewayConfig = flags_of(GatewayConfig)
    decode: DecodeConfig = flags_of(DecodeConfig)
    prefill: PrefillConfig = flags_of(PrefillConfig)
    store: StoreConfig = flags_of(StoreConfig)
