"""Random mixes of requests, aborts, stops, deaths and damage on small pools: exact, and no leak."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import zmq

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.generation import Abort, Generate, Stop
from kvferry.kvstore.wire.hello import Welcome
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.tests.rigs.handoff.cluster import BLOCK, FINGERPRINT, Answer, Cluster, prompt_of
from kvferry.tests.rigs.slow import slow_but


@pytest.fixture(autouse=True, params=["inline", "arena"])
def transfer(request: pytest.FixtureRequest) -> None:
    """Without a store, and with one through whose arena blocks are shipped."""
    if request.param == "arena":
        request.getfixturevalue("usual_store")


TURNS = 400


@dataclass
class Asked:
    prompt: list[int]
    message: Generate
    answer: Answer
    stopped: set[int]


class Mix:
    """One seeded run over a cluster with small pools."""

    def __init__(self, seed: int, kill_every: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(
            1,
            decode_blocks=self.random.choice([90, 120, 200]),
            prefill_blocks=self.random.choice([60, 100, 300]),
        )
        self.heads = [prompt_of(self.random.randrange(1, 700), seed=1000 + n) for n in range(3)]
        self.asked: list[Asked] = []
        self.kill_every = kill_every
        self.kills = 0

    def run(self) -> None:
        live: list[Asked] = []
        for turn in range(TURNS):
            if self.random.random() < 0.25:
                live.append(self.ask())
            if self.kill_every and turn % self.kill_every == self.kill_every - 1:
                self.restart_prefill()
            for one in list(live):
                if one.answer.ended or self.disturb(one):
                    live.remove(one)
            self.cluster.turn()
        self.cluster.until(lambda: all(one.answer.ended for one in live), 60)

    def ask(self) -> Asked:
        head = self.random.choice(self.heads)[: self.random.randrange(1, 700)]
        tail = prompt_of(self.random.choice([1, 5, 100, 300]), seed=self.random.randrange(20))
        message = self.cluster.message(
            head + tail,
            choices=self.random.choice([1, 1, 1, 2, 3]),
            max_tokens=self.random.choice([1, 2, 17, 60, 200]),
            priority=self.random.choice([0, 0, 1, -1]),
        )
        asked = Asked(head + tail, message, self.cluster.submit(message), set())
        self.asked.append(asked)
        return asked

    def disturb(self, one: Asked) -> bool:
        """Perhaps aborts it (True) or stops one of its choices."""
        chance = self.random.random()
        if chance < 0.003:
            self.cluster.gateway.send(Abort(one.message.request))
            self.asked.remove(one)
            return True
        if chance < 0.006:
            choice = self.random.randrange(one.message.choices)
            one.stopped.add(choice)
            self.cluster.gateway.send(Stop(one.message.request, choice, 0))
        return False

    def restart_prefill(self) -> None:
        """Kills the prefill node and starts another one on its address."""
        self.kills += 1
        self.cluster.kill_prefill(self.cluster.prefill[0])
        deadline = time.monotonic() + 10
        while True:
            try:
                server = Server(self.cluster.context, self.cluster.addresses[0], new_incarnation())
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline, "the address stays in use"
        engine = self.cluster.prefill_engines[0]
        spec = engine.spec
        server.open(Welcome("prefill", FINGERPRINT, BLOCK, spec.num_blocks, spec.max_model_len, 0))
        self.cluster.prefill[0] = self.cluster.new_prefill(engine, server)

    def judge(self) -> None:
        whole = [one for one in self.asked if one.answer.done is not None and one.answer.tokens]
        assert len(whole) > 20, "too few were answered to show anything"
        for one in self.asked:
            answer = one.answer
            if answer.rejected is not None:
                assert "KV cache" in answer.rejected.message
                continue
            assert answer.done is not None
            reference = self.cluster.reply(one.prompt, one.message.max_tokens)
            for choice in range(one.message.choices):
                ids = answer.ids(choice)
                assert ids == reference[: len(ids)]
                assert choice in one.stopped or len(ids) == one.message.max_tokens
            if answer.tokens:
                sources = answer.done.sources
                cached = sources.device + sources.host + sources.disk
                assert cached + sources.prefill + sources.decode == len(one.prompt)
                assert 0 <= sources.device < len(one.prompt) and sources.prefill >= 0
            stages = answer.done.stages
            assert all(getattr(stages, name) >= 0 for name in stages.__struct_fields__)
        self.cluster.until(self.cluster.idle)
        decode = self.cluster.decode
        assert not decode.requests


@pytest.mark.B1
@pytest.mark.parametrize("seed", slow_but(range(6), 2))
def test_a_random_mix_is_exact_and_leaves_nothing(seed: int) -> None:
    mix = Mix(seed, kill_every=0)
    mix.run()
    mix.judge()
    mix.cluster.close()


@pytest.mark.B3
@pytest.mark.B4
@pytest.mark.parametrize("seed", slow_but(range(6), 0))
def test_a_random_mix_survives_deaths_and_damage(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = Mix(100 + seed, kill_every=60)

    def sometimes_damaged(payload: bytes | memoryview) -> int:
        return 0 if mix.random.random() < 0.003 else checksum(payload)

    monkeypatch.setattr("kvferry.prefill_node.shipper.checksum", sometimes_damaged)
    mix.run()
    assert mix.kills == TURNS // 60
    mix.judge()
    mix.cluster.close()
