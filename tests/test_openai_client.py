"""The official Python client against the whole server: what its users do every day."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kvferry.kernels.standin import StandinConfig, standin_reply
from kvferry.tests.served import Served
from kvferry.tests.test_serve import idle, text_ids

MODEL = "standin"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_and_its_next_turn(client: openai.OpenAI, served: Served) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    assert first.usage is not None and first.usage.completion_tokens == 40
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].message.role == "assistant"
    again = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    size = again.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == (size - 1) // 16 * 16


def test_a_stream_equals_the_plain_answer(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=30, seed=11, temperature=0.9
    )
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=30,
        seed=11,
        temperature=0.9,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, ids, roles = "", [], set(), []
    usage = None
    for chunk in stream:
        ids.add(chunk.id)
        if not chunk.choices:
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        assert usage is None and chunk.usage is None
        roles += [choice.delta.role] if choice.delta.role else []
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == plain.choices[0].message.content
    assert reasons == [plain.choices[0].finish_reason]
    assert len(ids) == 1 and roles == ["assistant"]
    assert usage == plain.usage


def test_two_choices(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "messages": HELLO, "n": 2, "seed": 4, "max_tokens": 12}
    plain = client.chat.completions.create(**common)  # type: ignore[call-overload]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**common, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]
    assert texts[0] != texts[1]


def test_logprobs_belong_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 8
    for entry in logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the best"
    joined = b"".join(bytes(entry.bytes or b"") for entry in logprobs.content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content


def test_logprobs_of_a_split_character_are_its_bytes(client: openai.OpenAI) -> None:
    forced = text_ids("é😀")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=len(forced),
        logprobs=True,
        extra_body={"kvferry_force_ids": forced},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content] == [[byte] for byte in "é😀".encode()]
    assert answer.choices[0].message.content == "é😀"


def test_completions_with_ids_and_text(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model=MODEL,
        prompt="abc",
        max_tokens=5,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    ids = client.completions.create(
        model=MODEL,
        prompt=text_ids("abc"),
        max_tokens=5,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert text.choices[0].text == ids.choices[0].text
    found = ids.choices[0].model_dump()["token_ids"]
    assert found == standin_reply(text_ids("abc"), StandinConfig(), 5)[: len(found)]


@pytest.mark.C5
def test_errors_are_the_classes_that_users_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=7)
    assert wrong.value.param == "temperature"
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "x" * 9000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as over:
            client.chat.completions.create(model=MODEL, messages=long, stream=stream)
        assert over.value.code == "context_length_exceeded"
        assert "maximum context length" in str(over.value) and "8192" in str(over.value)


@pytest.mark.C3
def test_a_cancelled_stream_stops_the_compute(client: openai.OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    deadline = time.monotonic() + 10
    while not idle(served):
        assert time.monotonic() < deadline, "it still computes for nobody"
        time.sleep(0.05)
