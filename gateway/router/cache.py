"""All tiers of a deployment as one cache: what is where, and what is forgotten.

Owns the questions to every node and store about blocks, and how their answers are added up. A node
knows its device pool by keys alone; a store knows host memory and disk, and whose a block is. Who
does not answer makes the whole answer an error that names it, because nobody knows then what that
one has. It knows no path and no body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.gateway.errors import BadRequest, NotFound, Unavailable
from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.router.nodes import Nodes
from kvferry.kvstore.keys import split_keys, tenant_key

ANSWER_SECONDS = 10.0
"""What a node gets to answer: it may be in the middle of a step."""
_PLACES = {"h": "host", "d": "disk"}

Json = dict[str, Any]


def identity(name: str, node: NodeLink) -> Json:
    """Who a node is, in an answer."""
    return {"name": name, "role": node.role, "address": node.address}


# -- forgetting ------------------------------------------------------------------------------------


async def clear(
    nodes: Nodes, tenant: str | None, tiers: Sequence[str] = ("device", "store")
) -> Json:
    """Removes a tenant's blocks, or everybody's, that nobody is using, from these tiers.

    Of a tenant the stores remove their blocks. A device pool does not know whose its blocks are, so
    it forgets all that are not in use: the others' come back from the stores.

    Raises
    ------
    Unavailable
        A store is not there, or somebody did not answer: what it has is not known.
    """
    whose = b"" if tenant is None else tenant_key(tenant)
    cleared: list[tuple[Json, Json]] = []
    rows: list[Json] = []
    absent: list[str] = []
    # The stores first: what a node has forgotten it would fetch from there again.
    if "store" in tiers:
        cleared = await _ask_stores(nodes, "clear", "Not every cache was cleared", tenant=whose)
    if "device" in tiers:
        rows, absent = await _reset_devices(nodes)
    for store, answer in cleared:
        host = {"evicted": answer["cleared_host"], "held": answer.get("held", 0)}
        disk = {"evicted": answer["cleared_disk"], "held": 0}
        rows.append(store | {"tiers": {"host": host, "disk": disk}})
    return {"success": True, "tiers": _totals(rows), "nodes": rows, "absent": absent}


async def _reset_devices(nodes: Nodes) -> tuple[list[Json], list[str]]:
    """What each node's device pool forgot, and who is not there: it has nothing to forget."""
    named = [(node, name) for node, name in nodes.named() if node.role != "store"]
    linked = [(node, name) for node, name in named if node.welcome is not None]
    answers = await asyncio.gather(
        *(node.questions.reset_cache(ANSWER_SECONDS) for node, _ in linked)
    )
    silent = [name for (_, name), answer in zip(linked, answers, strict=True) if answer is None]
    if silent:
        raise _unavailable("Not every cache was reset: no answer from", silent)
    rows = [
        identity(name, node)
        | {"tiers": {"device": {"evicted": answer.evicted, "held": answer.held}}}
        for (node, name), answer in zip(linked, answers, strict=True)
        if answer is not None
    ]
    return rows, [name for node, name in named if node.welcome is None]


def _totals(rows: Sequence[Json]) -> Json:
    totals: Json = {}
    for row in rows:
        for tier, counts in row["tiers"].items():
            total = totals.setdefault(tier, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                total[name] += count
    return totals


# -- looking ---------------------------------------------------------------------------------------


async def stats(nodes: Nodes) -> Json:
    """What each node and store has; a store that does not answer has an `error` instead."""
    rows = [
        identity(name, node) | {"state": node.state, "tiers": {"device": _device(node)}}
        for node, name in nodes.named()
        if node.role != "store"
    ]
    stores = [(node, name) for node, name in nodes.named() if node.role == "store"]
    answers = await asyncio.gather(
        *(node.questions.store("stats", ANSWER_SECONDS) for node, _ in stores)
    )
    for (node, name), answer in zip(stores, answers, strict=True):
        rows.append(identity(name, node) | {"state": node.state} | answer)
    return {"nodes": rows}


def _device(node: NodeLink) -> Json:
    status = node.status
    if status is None:
        return {}
    return {
        "blocks_used": status.blocks_used,
        "blocks_cached": status.blocks_cached,
        "blocks_total": status.blocks_total,
    }


async def inspect(nodes: Nodes, packed: bytes) -> Json:
    """Where each block of a chain is: on which devices, and the best tier of a store."""
    keys = split_keys(packed)
    answers = []
    if nodes.stores:
        answers = await _ask_stores(nodes, "inspect", "The blocks cannot be found", keys=packed)
    letters = [answer["tiers"] for _, answer in answers]
    devices = [(node, name) for node, name in nodes.named() if node.role != "store"]
    blocks = [
        {
            "key": key.hex(),
            "device": [name for node, name in devices if key in node.keys],
            "store": _best([text[at : at + 1] for text in letters]),
        }
        for at, key in enumerate(keys)
    ]
    return {"blocks": blocks, "summary": summary(blocks)}


def _best(letters: Sequence[str]) -> str | None:
    found = [letter for letter in _PLACES if letter in letters]
    return _PLACES[found[0]] if found else None


def summary(blocks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many blocks are in each tier, in none, and without a gap from the first one on."""
    there = [bool(block["device"] or block["store"]) for block in blocks]
    return {
        "blocks": len(blocks),
        "device": sum(bool(block["device"]) for block in blocks),
        "host": sum(block["store"] == "host" for block in blocks),
        "disk": sum(block["store"] == "disk" for block in blocks),
        "missing": there.count(False),
        "prefix": there.index(False) if False in there else len(there),
    }


# -- keeping ---------------------------------------------------------------------------------------


async def pin(nodes: Nodes, packed: bytes, seconds: float) -> Json:
    """Keeps a chain's blocks in host memory; those on disk are read first."""
    answers = await _ask_stores(nodes, "pin", "Nothing was pinned", keys=packed, seconds=seconds)
    return {"blocks": len(split_keys(packed)), "pinned": _sum(answers, "pinned")}


async def unpin(nodes: Nodes, packed: bytes) -> Json:
    """Lets a chain's blocks be evicted again."""
    answers = await _ask_stores(nodes, "unpin", "Nothing was unpinned", keys=packed)
    return {"blocks": len(split_keys(packed)), "unpinned": _sum(answers, "unpinned")}


async def prefetch(nodes: Nodes, packed: bytes, seconds: float) -> Json:
    """Starts reading a chain's blocks from disk to host memory; `disk`: those on their way."""
    answers = await _ask_stores(nodes, "prefetch", "Nothing was read", keys=packed, seconds=seconds)
    letters = [answer["tiers"] for _, answer in answers]
    count = len(split_keys(packed))
    best = [_best([text[at : at + 1] for text in letters]) for at in range(count)]
    return {
        "blocks": count,
        "host": best.count("host"),
        "disk": best.count("disk"),
        "missing": best.count(None),
    }


def _sum(answers: Sequence[tuple[Json, Json]], name: str) -> int:
    return sum(int(answer[name]) for _, answer in answers)


# -- stores ----------------------------------------------------------------------------------------


async def _ask_stores(
    nodes: Nodes,
    action: str,
    failure: str,
    *,
    tenant: bytes = b"",
    keys: bytes = b"",
    seconds: float = 0.0,
) -> list[tuple[Json, Json]]:
    """Every store and its answer. Without any there is nothing to clear, and nothing to keep."""
    if not nodes.stores and action != "clear":
        raise NotFound("There is no store: it was turned off with --store-ram 0.", code="no_store")
    stores = [(node, name) for node, name in nodes.named() if node.role == "store"]
    absent = [name for node, name in stores if node.welcome is None]
    if absent:
        raise _unavailable(f"{failure}: no link to", absent)
    answers = await asyncio.gather(
        *(
            node.questions.store(action, ANSWER_SECONDS, tenant=tenant, keys=keys, seconds=seconds)
            for node, _ in stores
        )
    )
    for (_, name), answer in zip(stores, answers, strict=True):
        if "error" in answer:
            raise _unavailable(f"{failure}: {answer['error']}:", [name])
    whose = [identity(name, node) for node, name in stores]
    return list(zip(whose, answers, strict=True))


def _unavailable(text: str, names: Sequence[str]) -> Unavailable:
    return Unavailable(f"{text} {', '.join(names)}.", code="engine_unavailable", retry_after=2)


def keys_from_hex(texts: Sequence[str]) -> bytes:
    """Block keys as `inspect` writes them; BadRequest for what is none."""
    try:
        packed = b"".join(bytes.fromhex(text) for text in texts)
        if all(len(text) == 32 for text in texts):
            return packed
    except ValueError:
        pass
    raise BadRequest("keys must be block keys: 32 hexadecimal digits each.", param="keys")
