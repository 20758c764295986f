"""Every way in which a small hand-off can go, faults included, ends well.

All states of a gateway, a decode node, a prefill node and the channels between them are explored
(`handoff_explorer.py`), with two requests of at most two blocks and at most two faults. Random
walks show that a copied node does what one does that was never copied; mutants of the nodes show
that the exploration finds what it looks for.
"""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.decode_node import scheduler as decode_scheduler
from kvferry.decode_node.receiver import Receiver
from kvferry.decode_node.request import Sequence
from kvferry.decode_node.scheduler import DecodeScheduler
from kvferry.decode_node.transfers import Transfer, Transfers
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.prefill_node.job import Job, JobState
from kvferry.prefill_node.scheduler import PrefillScheduler
from kvferry.tests.rigs.handoff.explorer import Explorer, Violation
from kvferry.tests.rigs.handoff.machine import Given, Machine
from kvferry.tests.rigs.handoff.model import DecodeSide, PrefillSide
from kvferry.tests.rigs.handoff.setup import Setup, prompt_of
from kvferry.tests.rigs.handoff.world import CHANNEL, World
from kvferry.tests.rigs.slow import slow_but

# -- the real nodes --------------------------------------------------------------------------------

WALKS = 300
APART = (prompt_of([0, 1]), prompt_of([2, 3]))
FEWER = ("lose", "repeat", "abort", "restart_prefill", "restart_decode")
SHARED = Setup("shared", (prompt_of([0, 1]), prompt_of([0, 2])), faults=FEWER)
SMALL = Setup("one-on-decode", APART, decode_blocks=4, prefill_blocks=2)
ONCE = Setup("apart-once", APART, most_faults=1)
SETUPS = [
    Setup("apart", APART, faults=FEWER),
    ONCE,
    SHARED,
    SMALL,
    Setup("one-on-prefill", (prompt_of([0]), prompt_of([2])), prefill_blocks=1, faults=FEWER),
    Setup("declined", (prompt_of([0, 1]), prompt_of([0])), prefill_blocks=1),
]
PREEMPTED = Setup(
    "preempted",
    (prompt_of([0, 1], 0), prompt_of([2, 3])),
    decode_blocks=5,
    max_tokens=2,
    growth=0,
    faults=("lose", "repeat", "abort", "restart_prefill"),
)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Copies come and go in cycles by the thousand: collected in larger lots, unlogged."""
    threshold = gc.get_threshold()
    gc.set_threshold(20_000, 50, 50)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.set_threshold(*threshold)


def explorer(setup: Setup, faults: int, patch: pytest.MonkeyPatch) -> Explorer:
    patch.setattr(decode_scheduler, "GROWTH_TOKENS", setup.growth)
    return Explorer(setup, faults)


@pytest.mark.B1
@pytest.mark.B2
@pytest.mark.B3
@pytest.mark.D7
@pytest.mark.parametrize("setup", slow_but(SETUPS, ONCE), ids=lambda setup: setup.name)
def test_every_hand_off_ends_well(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    exploring = explorer(setup, setup.most_faults, monkeypatch)
    report = exploring.run()
    print(f"\n{setup.name}: {report}")
    assert report.ends > 1 and report.longest < 40 and report.channel >= CHANNEL
    assert report.faults.keys() == set(setup.faults)
    dice = random.Random(setup.name)
    for _ in range(WALKS):
        wander(exploring.world, dice, length=60)


@pytest.mark.slow
def test_every_hand_off_ends_well_with_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    test_every_hand_off_ends_well(PREEMPTED, monkeypatch)


class Witness:
    """A machine's steps, each taken by a node too that is neither copied nor merged with others."""

    def __init__(self, machine: Machine[Any], node: DecodeSide | PrefillSide) -> None:
        self._machine = machine
        self._node = node

    def step(self, state: int, given: Given) -> tuple[int, Any]:
        reached, result = self._machine.step(state, given)
        assert self._machine.run(self._node, given) == result, f"it does something else: {given}"
        assert self._machine.number(self._node) == reached, f"it is another one: {given}"
        return reached, result


def wander(world: World, dice: random.Random, length: int) -> None:
    """At each step anything that can happen may, a fault more seldom."""
    witnessed: Any = copy.copy(world)
    witnessed.decode = Witness(world.decode, DecodeSide(world.setup))
    witnessed.prefill = Witness(world.prefill, PrefillSide(world.setup))
    state = world.start(faults=2)
    for _ in range(length):
        if not world.left(state):
            break
        turns = [action for group in world.turns(state) for action in group]
        faults = list(world.faults(state)) if dice.random() < 0.1 else []
        action = dice.choice(faults or turns or [("time",)])
        state = (witnessed.fault if faults else witnessed.after)(state, action)
        if action[0] == "restart_decode":
            witnessed.decode = Witness(world.decode, DecodeSide(world.setup))
        if action[0] == "restart_prefill":
            witnessed.prefill = Witness(world.prefill, PrefillSide(world.setup))


# -- mutants ---------------------------------------------------------------------------------------


def _forgets_to_release(self: PrefillScheduler, job: Job) -> None:
    self.running.remove(job)
    job.state = JobState.DRAINED


def _keeps_aborted_jobs(self: PrefillScheduler, job: Job) -> None:
    job.state = JobState.ABORTED


def _does_not_look_again(self: DecodeScheduler, sequence: Sequence) -> bool:
    keys = sequence.keys
    found = self.pool.match_length(keys)
    if found < len(keys) and self.pool.is_pending(keys[found]):
        sequence.awaited = keys[found]
    return bool(sequence.awaited)


def _cancels_in_silence(self: Receiver, sequence: Sequence) -> None:
    transfer = self.transfers.of_owner(sequence)
    if transfer is not None:
        self.transfers.abort(transfer, acknowledged=True)


def _takes_all_for_landed(
    self: Receiver, transfer: Transfer[Sequence], *, acknowledged: bool, again: bool = False
) -> None:
    self.transfers.abort(transfer, acknowledged=acknowledged)
    self._release(transfer, transfer.last)


def _finds_the_dead(
    self: Transfers[Sequence], number: int, epoch: int
) -> Transfer[Sequence] | None:
    return self._transfers.get(number)


def _nobody(*arguments: object) -> list[Job]:
    return []


def _nothing(*arguments: object, **more: object) -> None:
    pass


MUTANTS = {
    "blocks-not-released": (1, PrefillScheduler, "_let_go", _forgets_to_release, "held by nobody"),
    "aborted-jobs-kept": (1, PrefillScheduler, "abort", _keeps_aborted_jobs, "1 jobs"),
    "lost-peers-forgotten": (1, PrefillScheduler, "of_peer", _nobody, "1 jobs"),
    "claims-not-cleared": (1, BlockPool, "_unclaim", _nothing, "a claim on a block nobody holds"),
    "waits-for-ever": (0, DecodeScheduler, "_awaits_other", _does_not_look_again, "open requests"),
    "drained-ignored": (
        1,
        Transfers,
        "drained",
        _nothing,
        "round and round: .* draining transfers",
    ),
    "dead-transfers-found": (1, Transfers, "find", _finds_the_dead, "IndexError"),
    "death-unnoticed": (1, Receiver, "_lost", _nothing, "live transfers"),
    "loss-unnoticed": (1, Receiver, "_progress", _nothing, "round and round: open requests"),
    "cancelled-in-silence": (2, Receiver, "cancel", _cancels_in_silence, "1 jobs"),
    "landed-by-mistake": (1, Receiver, "_fail", _takes_all_for_landed, "a wrong token"),
}
FOUND_LATE = {"drained-ignored", "cancelled-in-silence"}


@pytest.mark.parametrize("name", slow_but(MUTANTS, *MUTANTS.keys() - FOUND_LATE))
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, owner, method, mutant, expected = MUTANTS[name]
    monkeypatch.setattr(mutant, "__name__", method)  # copies find bound methods by name
    monkeypatch.setattr(owner, method, mutant)
    setup = SHARED if owner is DecodeScheduler else SMALL
    with pytest.raises(Violation, match=expected) as found:
        explorer(setup, faults, monkeypatch).run()
    print(f"\n{name}: {found.value}")
    assert len(found.value.trace) < 20
