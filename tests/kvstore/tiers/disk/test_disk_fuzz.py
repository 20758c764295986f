"""The tiers under a disk that does everything at the worst moment: accounts hold after each step.

The disk's thread is ahead of what the tiers know by a random number of jobs, and what it did
becomes known a few outcomes at a time.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from kvferry.kvstore.tiers.disk import slots
from kvferry.tests.rigs.slow import slow_but
from kvferry.tests.rigs.store.rig import chain_keys
from kvferry.tests.rigs.store.tiers import SPAN, StubbornFiles, TiersRig

CAP = 64 * SPAN
TENANTS = [b"t" * 16, b"u" * 16, b"v" * 16]
USUAL = {"put": 6.0, "read": 4.0, "ahead": 8.0, "hear": 6.0, "tick": 6.0, "clear": 0.1}
FAULTS = {"fail writes": 0.2, "fail reads": 0.1, "damage reads": 0.1, "fail deletes": 0.2}
OUTSIDE = {"unlink": 0.1, "truncate": 0.1, "rmtree": 0.02}


class Fuzz:
    """One run: `step` does something, and proves all accounts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.files = StubbornFiles(folder)
        self.rig = TiersRig(folder, slots=48, cap=CAP, files=self.files)
        self.chains = [chain_keys(number, 4, str(number % 3)) for number in range(40)]
        self.num_fetches = 0

    def step(self, what: str) -> None:
        rig, dice = self.rig, self.dice
        number = min(len(self.chains) - 1, int(dice.expovariate(1 / 12)))
        match what:
            case "put":
                rig.put(self.chains[number], tenant=TENANTS[number % 3])
            case "read":
                self.read(self.chains[number])
            case "ahead":
                rig.run_ahead(dice.randrange(1, 20))
            case "hear":
                rig.hear(dice.choice((1, 2, 3, 100)))
            case "tick":
                rig.tick(dice.choice((0.1, 1.0, 40.0)))
            case "clear":
                rig.tiers.clear(dice.choice([*TENANTS, None]))
            case "fail writes":
                rig.faults.fail_writes = dice.randrange(1, 4)
            case "fail reads":
                rig.faults.fail_reads = 1
            case "damage reads":
                rig.faults.damage_reads = 1
            case "fail deletes":
                self.files.refusals = dice.randrange(1, 3)
            case _:
                self.from_outside(what)
        rig.tiers.check()

    def from_outside(self, what: str) -> None:
        folder = self.files.folder
        if what == "rmtree":
            shutil.rmtree(folder, ignore_errors=True)
            return
        found = sorted(folder.glob("slots-*"))
        if not found:
            return
        path = self.dice.choice(found)
        if what == "unlink":
            path.unlink()
        else:
            os.truncate(path, self.dice.randrange(path.stat().st_size + 1))

    def read(self, keys: list[bytes]) -> int:
        self.num_fetches += 1
        return self.rig.read(keys, self.num_fetches)

    def settle(self) -> None:
        faults = self.rig.faults
        faults.fail_writes = faults.fail_reads = faults.damage_reads = self.files.refusals = 0
        self.rig.settle()
        self.rig.tiers.check()
        ledger = self.rig.index.ledger()
        assert ledger["in_flight"] == ledger["to_erase"] == 0


@pytest.mark.A6
@pytest.mark.parametrize("seed", slow_but(range(4), 1))
@pytest.mark.parametrize("kinds", ["usual", "faults", "outside"])
def test_accounts_hold_whatever_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str, seed: int
) -> None:
    monkeypatch.setattr(slots, "FEWEST_FILES", 8)  # eight slots each
    folder = tmp_path / "blocks"
    folder.mkdir()
    fuzz = Fuzz(folder, seed)
    rig = fuzz.rig
    odds = USUAL | {"usual": {}, "faults": FAULTS, "outside": FAULTS | OUTSIDE}[kinds]
    for _ in range(2500):
        fuzz.step(fuzz.dice.choices(list(odds), list(odds.values()))[0])
        assert kinds == "outside" or rig.bytes_on_disk() <= CAP, "the hard cap was passed"
    fuzz.settle()
    assert rig.counter("disk_evictions") > 100 and rig.counter("disk_reads") > 50
    if kinds != "outside":
        assert rig.bytes_on_disk() == rig.index.used
        kept = [key for chain in fuzz.chains for key in chain if key in rig.index]
        assert kept and all(fuzz.read([key]) == 1 for key in kept), "what was kept was lost"
    if kinds == "usual":
        damages = ("short", "gone", "header", "payload")
        assert [rig.counter(f"disk_damaged_{damage}") for damage in damages] == [0] * 4
    fuzz.files.close()
