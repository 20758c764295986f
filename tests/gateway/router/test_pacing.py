"""Slices of the event loop: order kept, others let in between, nothing lost."""

from __future__ import annotations

import asyncio

from kvferry.gateway.router.pacing import MessagePacer, RequestPacer
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import StepOutput, Token
from kvferry.kvstore.wire.status import Drain


def tokens(count: int, start: int = 0) -> StepOutput:
    return StepOutput(tuple(Token(start + at, 0, 0, 5) for at in range(count)))


def numbers(messages: list[AnyMessage]) -> list[int]:
    return [it.request for one in messages if isinstance(one, StepOutput) for it in one.tokens]


def test_a_large_step_is_handed_over_in_slices_and_in_order() -> None:
    async def run() -> None:
        got: list[AnyMessage] = []
        idle: list[int] = []
        pacer = MessagePacer(got.append, 10, lambda: idle.append(len(got)))
        for message in (tokens(35), Drain(), tokens(3, 35)):
            pacer.push(message)
        assert numbers(got) == list(range(10)), "a slice at once, when nobody was before"
        assert pacer.busy
        turns = 0
        while len(numbers(got)) < 38:
            before = len(numbers(got))
            await asyncio.sleep(0)
            turns += 1
            assert len(numbers(got)) - before <= 10
        assert numbers(got) == list(range(38)) and turns >= 3
        assert isinstance(got[-2], Drain), "nothing overtakes"
        assert not pacer.busy and idle == [len(got)]
        pacer.push(tokens(1, 38))
        assert numbers(got)[-1] == 38

    asyncio.run(run())


def test_a_flush_leaves_nothing_behind() -> None:
    async def run() -> None:
        got: list[AnyMessage] = []
        pacer = MessagePacer(got.append, 10, lambda: None)
        pacer.push(tokens(100))
        pacer.flush()
        assert numbers(got) == list(range(100))
        await asyncio.sleep(0)
        assert numbers(got) == list(range(100))

    asyncio.run(run())


def test_so_many_requests_pass_a_turn_in_order() -> None:
    async def run() -> None:
        pacer, passed, turns = RequestPacer(4), [], [0]

        async def task(number: int) -> None:
            await pacer.turn()
            passed.append((number, turns[0]))

        def count() -> None:
            turns[0] += 1
            asyncio.get_running_loop().call_soon(count)

        tasks = [asyncio.create_task(task(number)) for number in range(40)]
        tasks[20].cancel()
        count()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [number for number, _ in passed] == [at for at in range(40) if at != 20]
        at_turn = [turn for _, turn in passed]
        assert max(at_turn.count(turn) for turn in at_turn) <= 4
        await asyncio.wait_for(task(99), 1)

    asyncio.run(run())


def test_who_leaves_the_line_gives_up_no_place() -> None:
    async def run() -> None:
        pacer = RequestPacer(1)
        tasks = [asyncio.create_task(pacer.turn()) for _ in range(10)]
        await asyncio.sleep(0)
        for one in tasks[1:9]:
            one.cancel()
        await asyncio.wait_for(tasks[9], 5)
        assert tasks[0].done() and all(one.cancelled() for one in tasks[1:9])

    asyncio.run(run())
