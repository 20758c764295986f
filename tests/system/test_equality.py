"""What the whole server writes is what transformers writes: real weights, text and processes.

Greedy, float32, 16 new tokens of 18 prompts of 5 to 1,000 tokens (more and longer in
`make bench-equality`): alone and in a batch of 16, cold and repeated, with a prefill node and
without one. Random weights as well: around the sizes of a block and a chunk, out of every tier of a
store, after a kill of everything, and after a preemption. A difference counts unless the oracle
itself was undecided there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.models.oracle import TIE, Judge, greedy, load_oracle
from kvferry.tests.rigs.models.prompts import real_prompts
from kvferry.tests.rigs.models.tiny import write_tiny_model
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.slow import slow_but

NEW = 16
BATCH = 16
ALONE = (7, 16)
"""Prompts that are run one at a time, the others together; `make bench-equality` runs all of them
both ways."""

B, C = 16, 512
AROUND = (1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1,
          C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 1)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    return real_prompts(smollm2)


@pytest.fixture(scope="module")
def judge(smollm2: Path) -> Judge:
    return Judge(load_oracle(smollm2))


@pytest.fixture(scope="module", params=["apart", "alone"])
def real(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    nodes = 1 if request.param == "apart" else 0
    log = tmp_path_factory.mktemp("real") / "log"
    cluster = Served(smollm2, log, f"--prefill-nodes={nodes}", "--dtype=float32")
    yield cluster
    assert cluster.stop() == 0, log.read_text()


def together(served: Served, prompts: Sequence[list[int]], count: int, salt: str) -> list[Any]:
    """All prompts, `BATCH` at a time."""
    with ThreadPoolExecutor(BATCH) as pool:
        return list(
            pool.map(
                lambda prompt: served.complete(
                    prompt=prompt, max_tokens=count, return_token_ids=True, cache_salt=salt
                ),
                prompts,
            )
        )


def check(judge: Judge, prompts: Sequence[list[int]], answers: Sequence[Any], cached: bool) -> None:
    """Equal but for ties, and cached exactly when said so."""
    ties = []
    for prompt, answer in zip(prompts, answers, strict=True):
        got = answer["choices"][0]["token_ids"]
        assert len(got) == NEW
        verdict = judge(prompt, got)
        assert verdict.equal, f"prompt of {len(prompt)} tokens differs at {verdict.wrong_at}"
        if verdict.tie_at is not None:
            ties.append((len(prompt), verdict.tie_at))
        hits = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert hits == ((len(prompt) - 1) // B * B if cached else 0)
    print(f"{len(answers)} texts, parted at a tie (prompt, position): {ties}")
    assert len(ties) <= len(answers) // 5, "more ties than rounding explains"


@pytest.mark.slow
def test_real_texts_in_a_batch_cold_then_repeated(
    real: Served, prompts: list[list[int]], judge: Judge
) -> None:
    some = [prompt for at, prompt in enumerate(prompts) if at not in ALONE]
    assert len(some) == BATCH
    check(judge, some, together(real, some, NEW, "batch"), cached=False)
    check(judge, some, together(real, some, NEW, "batch"), cached=True)


@pytest.mark.slow
def test_real_texts_alone(real: Served, prompts: list[list[int]], judge: Judge) -> None:
    few = [prompts[at] for at in ALONE]
    answers = [
        real.complete(prompt=prompt, max_tokens=NEW, return_token_ids=True, cache_salt="alone")
        for prompt in few
    ]
    check(judge, few, answers, cached=False)
    with_prefill = [answer["timings"]["prompt_tokens"]["prefill"] > 0 for answer in answers]
    apart = "prefill" in real.children()
    assert with_prefill == [apart and len(prompt) > 128 for prompt in few]


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text changes with nearly every damaged block."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    write_tiny_model(folder, tokenizer_from=smollm2)
    return folder


def test_the_judge_sees_one_wrong_token(tiny: Path, prompts: list[list[int]]) -> None:
    model = load_oracle(tiny)
    judge, prompt = Judge(model), prompts[3]
    text, margins = greedy(model, prompt, 12)
    assert min(margins) > TIE and judge(prompt, text).equal
    for at, token in enumerate(text):
        assert judge(prompt, [*text[:at], token + 1, *text[at + 1 :]]).wrong_at == at


@pytest.mark.B9
@pytest.mark.parametrize("nodes", slow_but([1, 0], 1), ids=["apart", "alone"])
def test_lengths_around_block_and_chunk(
    smollm2: Path, tiny: Path, tmp_path: Path, nodes: int
) -> None:
    """Cold, repeated, longer."""
    prompts = real_prompts(smollm2, [length + 1 for length in AROUND])
    cold = [prompt[:-1] for prompt in prompts]
    judge = Judge(load_oracle(tiny))
    served = Served(tiny, tmp_path / "log", f"--prefill-nodes={nodes}")
    try:
        check(judge, cold, together(served, cold, NEW, "b9"), cached=False)
        check(judge, cold, together(served, cold, NEW, "b9"), cached=True)
        check(judge, prompts, together(served, prompts, NEW, "b9"), cached=True)
    finally:
        assert served.stop() == 0


@pytest.mark.slow
def test_every_tier_gives_the_text_of_the_oracle(smollm2: Path, tiny: Path, tmp_path: Path) -> None:
    """Cold, from host memory, and from disk after everything was killed."""
    prompts = real_prompts(smollm2, AROUND)
    judge = Judge(load_oracle(tiny))
    flags = ("--prefill-nodes=1", "--admin-api-key=root", "--store-ram=64MiB",
             "--store-disk=256MiB", f"--store-dir={tmp_path / 'blocks'}")  # fmt: skip
    served = Served(tiny, tmp_path / "log", *flags)
    admin = {"authorization": "Bearer root"}
    try:
        check(judge, prompts, together(served, prompts, NEW, "tiers"), cached=False)
        body = {"all": True, "tiers": ["device"]}
        assert served.post("/admin/cache/clear", body, headers=admin).status_code == 200
        answers = together(served, prompts, NEW, "tiers")
        check(judge, prompts, answers, cached=True)
        assert came_from(answers, "host")
        wait_until(lambda: served.metric("kvferry_store_unwritten_bytes") == 0, 30)
    finally:
        served.kill()
    served = Served(tiny, tmp_path / "log", *flags)
    try:
        answers = together(served, prompts, NEW, "tiers")
        check(judge, prompts, answers, cached=True)
        assert came_from(answers, "disk")
    finally:
        assert served.stop() == 0


def came_from(answers: Sequence[Any], tier: str) -> bool:
    """All that was cached."""
    found = [answer["timings"]["prompt_tokens"] for answer in answers]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    return [one[tier] for one in found] == cached


@pytest.mark.slow
@pytest.mark.D3
def test_what_was_preempted_is_the_text_of_the_oracle(
    smollm2: Path, tiny: Path, tmp_path: Path
) -> None:
    """Sixteen at once over a pool for five: what gives way comes back from the store."""
    prompts = real_prompts(smollm2, range(97, 113))
    flags = ("--prefill-nodes=0", "--kv-cache-memory-bytes=640KiB", "--max-model-len=256",
             "--store-ram=64MiB", "--store-disk=0")  # fmt: skip
    served = Served(tiny, tmp_path / "log", *flags)
    try:
        with ThreadPoolExecutor(BATCH) as pool:
            asked = [
                pool.submit(served.complete, prompt=prompt, max_tokens=100, return_token_ids=True)
                for prompt in prompts
            ]
        judge = Judge(load_oracle(tiny))
        for prompt, one in zip(prompts, asked, strict=True):
            assert judge(prompt, one.result()["choices"][0]["token_ids"]).equal
        assert served.metric("kvferry_num_preemptions_total") > 0
    finally:
        assert served.stop() == 0
