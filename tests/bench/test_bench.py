"""The load client against a server that follows a script, and what is computed from its answers.

The clock judges nothing here: the script says in which event the first text is, and the client's
stamps must be those of that event.
"""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvferry.bench.client import figures
from kvferry.bench.client.figures import (
    gaps_touching,
    gaps_within,
    percentile,
    spread,
    tokens_per_second,
)
from kvferry.bench.client.load import (
    Answer,
    Arrival,
    Recording,
    Target,
    chat,
    completion,
    stream,
    together,
)
from kvferry.bench.client.prompts import NoChats, Prompts, chats_of
from kvferry.bench.document import write_section
from kvferry.bench.equality.__main__ import groups
from kvferry.bench.equality.comparison import Outcome, Output, comparison, judge
from kvferry.bench.serve.scenarios import BadAnswer, Interference, Ttft, TtftRounds, check_whole
from kvferry.bench.serve.tiers import TierResults, TierRounds, judge_tiers
from kvferry.bench.serve.verdicts import Results
from kvferry.bench.serve.verdicts import judge as judge_ratios
from kvferry.tests.rigs.models.oracle import Greedy

T = TypeVar("T")
PAUSE = 0.03
DONE = b"data: [DONE]\n\n"
Script = Sequence[bytes | float]
"""Bytes to write, and seconds to wait between them."""


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def delta(**content: str) -> bytes:
    return event(choices=[{"index": 0, "delta": content}])


def text(content: str, *ids: int) -> bytes:
    return event(choices=[{"index": 0, "text": content, "token_ids": list(ids)}])


def usage(tokens: int, prompt: int = 3) -> bytes:
    return event(choices=[], usage={"completion_tokens": tokens, "prompt_tokens": prompt})


def head(status: int = 200) -> bytes:
    kind = "text/event-stream" if status == 200 else "application/json"
    return (
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()


def framed(*parts: bytes) -> bytes:
    """HTTP chunks, all in one segment."""
    return b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)


END = b"0\r\n\r\n"


class Mock:
    """Answers every request by the script; notes what was asked and who left."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.left = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.paths.append(asked.split(" ")[1])
        length = int(asked.partition("Content-Length: ")[2].split("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        try:
            for step in self.script:
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                else:
                    await asyncio.sleep(step)
        except ConnectionError:
            self.left.set()
        finally:
            writer.close()


def against(script: Script, work: Callable[[Mock, Target], Awaitable[T]]) -> T:
    """Runs `work` against a server with this script."""

    async def run() -> T:
        mock = Mock(script)
        server = await asyncio.start_server(mock.answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await work(mock, Target("127.0.0.1", port, "m"))

    return asyncio.run(run())


def answer_to(*script: bytes | float) -> Answer:
    return against(script, lambda _, target: stream(target, completion([1, 2, 3], 4)))


# -- the load client -----------------------------------------------------------------------------


def test_first_token_is_the_first_text_that_is_not_empty() -> None:
    answer = answer_to(
        head(),
        framed(delta(role="assistant", content="")),
        PAUSE,
        framed(delta(content="")),
        PAUSE,
        framed(delta(content="a")),
        PAUSE,
        framed(delta(content="b"), usage(2), DONE) + END,
    )
    assert answer.failure == ""
    assert [one.text for one in answer.arrivals] == ["a", "b"]
    assert answer.first == answer.arrivals[0].at
    assert answer.ttft >= 2 * PAUSE
    assert answer.arrivals[1].at - answer.arrivals[0].at >= PAUSE / 2


def test_reasoning_is_text() -> None:
    answer = answer_to(
        head(),
        framed(delta(reasoning_content="hm"), delta(content="a"), usage(2), DONE) + END,
    )
    assert answer.text == "hma"


def test_an_answer_without_text_is_a_failure() -> None:
    answer = answer_to(head(), framed(usage(5), DONE) + END)
    assert answer.failure == "no text"
    assert answer.ttft == float("inf")


def test_tokens_are_counted_from_usage_whatever_the_events() -> None:
    pieces = [text("abcd") for _ in range(25)]
    merged = [framed(a + b) for a, b in zip(pieces[:24:2], pieces[1:24:2], strict=True)]
    answer = answer_to(head(), *merged, framed(pieces[24]), framed(usage(100), DONE) + END)
    assert answer.tokens == 100
    assert len(answer.arrivals) == 25


def test_events_split_anywhere_are_whole_again() -> None:
    body = text("héé\u2028💡", 1, 2) + text("x", 3) + usage(3) + DONE
    script: list[bytes | float] = [head()]
    for at in range(len(body)):
        script += [framed(body[at : at + 1]), 0.0]
    answer = answer_to(*script, END)
    assert (answer.text, answer.ids) == ("héé\u2028💡x", [1, 2, 3])
    assert answer.failure == ""


def test_comments_and_carriage_returns_are_skipped() -> None:
    lines = b": keep-alive\r\n\r\n" + text("a").replace(b"\n", b"\r\n") + usage(1) + DONE
    assert answer_to(head(), framed(lines) + END).text == "a"


def test_what_is_asked() -> None:
    async def work(mock: Mock, target: Target) -> Mock:
        await stream(target, completion([7, 8], 5, cache_salt="s"))
        await stream(target, chat([{"role": "user", "content": "hi"}], 6))
        return mock

    mock = against([head(), framed(text("a"), usage(1), DONE) + END], work)
    assert mock.paths == ["/v1/completions", "/v1/chat/completions"]
    first, second = mock.bodies
    assert first["prompt"] == [7, 8]
    assert first["ignore_eos"] and first["stream"]
    assert first["stream_options"] == {"include_usage": True}
    assert (first["model"], first["max_tokens"], first["cache_salt"]) == ("m", 5, "s")
    assert second["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in second


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ([head(503), framed(b'{"error": {}}') + END], "status 503"),
        ([head(), framed(text("a"), event(error={"message": "x"}))], "error event"),
        ([head(), framed(text("a"))], "truncated"),
        ([head(), framed(text("a"), usage(1)) + END], "truncated"),
        ([b"SMTP?\r\n\r\n"], "not HTTP"),
        ([], "truncated"),
    ],
)
def test_failures_have_classes(script: Script, failure: str) -> None:
    assert answer_to(*script).failure == failure


def test_nobody_listens() -> None:
    async def work(_: Mock, target: Target) -> Answer:
        return await stream(Target(target.host, 1, "m"), completion([1], 1))

    assert against([], work).failure == "connection"


def test_a_server_that_never_answers_is_given_up() -> None:
    async def work(mock: Mock, target: Target) -> Answer:
        return await stream(target, completion([1], 1), limit_s=PAUSE)

    assert against([head(), 10.0], work).failure == "timeout"


def test_a_stream_that_is_cancelled_keeps_what_came_and_closes_its_connection() -> None:
    async def work(mock: Mock, target: Target) -> Recording:
        recording = Recording()
        task = asyncio.create_task(stream(target, completion([1], 1), recording))
        while len(recording.events) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(mock.left.wait(), 10)
        return recording

    more: list[bytes | float] = [0.001, framed(text("c", 3))]
    answer = against([head(), framed(text("a", 1), text("b", 2)), *more * 2000], work).read()
    assert answer.ids[:2] == [1, 2]
    assert answer.failure == "truncated"


def test_several_at_once() -> None:
    script = [head(), framed(text("a", 1), usage(1), DONE) + END]
    asks = [completion([1], 1)] * 5
    answers = against(script, lambda _, target: together(target, asks))
    assert [answer.failure for answer in answers] == [""] * 5


def test_an_answer_with_other_tokens_than_asked_for_is_no_measurement() -> None:
    ask = completion([1, 2, 3], 4)
    whole = [head(), framed(text("a"), usage(4), DONE) + END]
    check_whole(ask, answer_to(*whole))
    for script in ([head(), framed(text("a"), usage(3), DONE) + END], [head(503), END]):
        with pytest.raises(BadAnswer):
            check_whole(ask, answer_to(*script))


# -- figures -------------------------------------------------------------------------------------


def answer_at(*moments: float, ids: int = 1, tokens: int = 0) -> Answer:
    arrivals = tuple(Arrival(at, "x", tuple(range(ids))) for at in moments)
    return Answer(0.0, arrivals, {"completion_tokens": tokens}, {}, "")


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([3.0], 0.99) == 3
    assert percentile([1.0, 2.0, float("inf")], 0.99) == float("inf")


def test_a_spread_is_median_and_extremes() -> None:
    found = spread([5.0, 1.0, 3.0])
    assert (found.median, found.low, found.high, found.rounds) == (3, 1, 5, 3)


def test_the_rate_counts_only_while_all_streams_run() -> None:
    early, late = answer_at(0, 1, 2, 3, 4), answer_at(2, 3, 4, 5, 6)
    assert tokens_per_second([early]) == 1.0
    assert tokens_per_second([early, late]) == 2.0
    assert tokens_per_second([answer_at(0, 1), answer_at(2, 3)]) == 0.0


def test_the_rate_counts_tokens_not_events() -> None:
    assert tokens_per_second([answer_at(0, 1, 2, ids=4)]) == 4.0
    assert tokens_per_second([answer_at(0, 1, 2, ids=0, tokens=6)]) == 2.0


def test_gaps_at_the_edges() -> None:
    answer = answer_at(0, 1, 5, 6)
    assert gaps_within(answer, 0, 4) == [1]
    assert gaps_touching(answer, 0.5, 4) == [1, 4]
    assert gaps_touching(answer, 1, 5) == [4]


# -- prompts -------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_chats_up_to_the_record_that_is_cut_off() -> None:
    records = [
        {"conversations": [{"from": "human", "value": " a "}, {"from": "gpt", "value": "b"}]},
        {"conversations": []},
        {"conversations": [{"from": "human", "value": "c"}]},
    ]
    whole = json.dumps(records, indent=2)
    assert list(chats_of(whole)) == ["a\n\nb", "c"]
    assert list(chats_of(whole[:-10])) == ["a\n\nb"]


def test_prompts_are_exact_and_differ_from_the_first_token_on() -> None:
    chats = [f"{chr(97 + n % 20)} chat {n}" for n in range(60)]
    prompts = Prompts(chats, seed=1)
    taken = [prompts.take(encode, size) for size in (1, 5, 30, 16, 16)]
    assert [len(ids) for ids in taken] == [1, 5, 30, 16, 16]
    assert len({ids[0] for ids in taken}) == 5
    assert taken[0] == Prompts(chats, seed=1).take(encode, 1)
    assert taken[2] != Prompts(chats, seed=2).take(encode, 30)
    with pytest.raises(NoChats):
        prompts.take(encode, 10_000)


# -- verdicts ------------------------------------------------------------------------------------


def rounds(cold_s: float, repeat_s: float, handoff_ms: float) -> TtftRounds:
    timings = {"handoff_ms": handoff_ms}
    cold = Answer(0.0, (Arrival(cold_s, "x", ()),), {}, timings, "")
    repeat = Answer(0.0, (Arrival(repeat_s, "x", ()),), {}, {}, "")
    return TtftRounds("apart", 2048, (Ttft(cold, repeat),) * 3, 1.0)


@pytest.mark.parametrize(
    ("repeat_s", "handoff_ms", "busy", "holds"),
    [
        (0.1, 30.0, 2.0, [True, True, True]),
        (0.11, 31.0, 2.1, [False, False, False]),
    ],
)
def test_the_ratios(repeat_s: float, handoff_ms: float, busy: float, holds: list[bool]) -> None:
    gaps = Interference("apart", 6000, 1, (1.0,) * 200, (busy,) * 200, (9.0,))
    others = Interference("alone", 6000, 1, (1.0,), (99.0,), (9.0,))
    results = Results([rounds(1.0, repeat_s, handoff_ms)], [], [gaps, others])
    verdicts = judge_ratios(results, "apart", 2048)
    assert [verdict.holds for verdict in verdicts] == holds


def test_a_hand_off_that_never_was_does_not_pass() -> None:
    nothing = replace(rounds(1.0, 0.1, 0.0), shipped_bytes=0.0)
    verdicts = judge_ratios(Results([nothing], [], []), "apart", 2048)
    assert [verdict.holds for verdict in verdicts] == [False, True]


@pytest.mark.parametrize("holds", [True, False])
def test_a_kill_costs_the_next_turn_little(holds: bool) -> None:
    late = 0.3 if holds else 0.31
    warm = {"device": (0.1,) * 3, "host": (0.2,) * 3, "killed": (9.0, late, 0.1),
            "disk": (0.1, late, 9.0)}  # fmt: skip
    sizes = tuple(TierRounds(size, (3.0,) * 3, warm, 5e8) for size in (2000, 4000))
    results = TierResults(sizes, {"host": 5e9, "killed": 2e9, "disk": 1e9})
    assert [verdict.holds for verdict in judge_tiers(results, 4000)] == [holds] * 3
    floors = [results.floor(sizes[0], tier) for tier in ("device", "host", "killed", "disk")]
    assert floors == pytest.approx([0.1, 0.2, 0.35, 0.6])


def test_a_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text("# Title\n")
    for body in ("one\n", "two\n"):
        write_section(path, "bench", body)
        write_section(path, "equality", body)
    path.write_text(path.read_text() + "the end\n")
    write_section(path, "bench", "three\n")
    said = path.read_text()
    assert said.startswith("# Title\n") and said.endswith("the end\n")
    assert "one" not in said and said.count("two") == 1 and said.count("three") == 1


def test_the_client_needs_nothing_of_the_server() -> None:
    folder = Path(figures.__file__).parent
    modules = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    found = [node for module in modules for node in ast.walk(module)]
    names = {node.module for node in found if isinstance(node, ast.ImportFrom)}
    names |= {it.name for node in found if isinstance(node, ast.Import) for it in node.names}
    ours = [name for name in names if name and name.startswith("kvferry")]
    assert all(name.startswith("kvferry.bench.client.") for name in ours)
    tops = {str(name).partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert tops == {"kvferry", "httptools", "orjson"}


# -- equality ------------------------------------------------------------------------------------

WANT = Greedy([1, 2, 3], [1.0, 1e-4, 1.0])


def test_a_difference_counts_unless_the_oracle_was_undecided() -> None:
    assert judge(WANT, [1, 2, 3]).kind == "equal"
    assert (judge(WANT, [1, 9, 9]).kind, judge(WANT, [1, 9, 9]).at) == ("tie", 1)
    assert (judge(WANT, [1, 2, 9]).kind, judge(WANT, [1, 2, 9]).at) == ("different", 2)
    assert judge(WANT, [9, 2, 3]).kind == "different"
    assert judge(WANT, [1, 2]).kind == "different"
    assert judge(WANT, [1, 2, 3, 4]).kind == "different"


def test_the_comparison_hides_no_tie() -> None:
    outputs = (Output(0, (1, 9, 9)), Output(1, (1, 2, 3)))
    cold = Outcome("apart", "alone", outputs, (("prefill", 7),))
    batch = Outcome("apart", "batch", (*outputs[1:], Output(0, (1, 2, 3))), ())
    said = comparison([cold, batch], [WANT, WANT], [5, 1100], ("alone", "batch"))
    assert "| apart | 1 of 2 |" in said
    assert "| apart | alone | 1 | 1 | 0 | prefill 7 |" in said
    assert "| apart | alone | 5 | 1 | 1.0e-04 | tie, not compared further |" in said


def test_servers_that_were_not_asked_both_ways_are_compared_with_the_oracle_only() -> None:
    stored = Outcome("stored", "from disk", (Output(0, (1, 2, 3)),), (("disk", 5),))
    said = comparison([stored], [WANT], [5], ("alone", "batch"))
    assert "| stored | from disk | 1 | 0 | 0 | disk 5 |" in said
    assert "alone" not in said
    cold = [Outcome("apart", way, (Output(0, (1, 2, 3)),), ()) for way in ("alone", "batch")]
    assert "| apart | 1 of 1 |" in comparison([*cold, stored], [WANT], [5], ("alone", "batch"))


def test_every_batch_is_full_if_there_are_prompts_enough() -> None:
    assert groups(3, 1) == [range(0, 1), range(1, 2), range(2, 3)]
    assert groups(24, 16) == [range(16), range(8, 24)]
    assert groups(32, 16) == [range(16), range(16, 32)]
    assert groups(6, 16) == [range(6)]
