"""The official Python client against the whole server: what its users do every day."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.kernels.engines.standin import StandinConfig, standin_reply
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.servers.streams import nodes_idle, text_ids

if TYPE_CHECKING:  # whoever needs it imports it: it takes long
    import openai
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionMessageParam

MODEL = "standin"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    import openai

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


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_the_second_turn_finds_the_first_and_its_reply(client: openai.OpenAI, stream: bool) -> None:
    """Of random bytes, so that the reply's text says little of its ids."""
    checked = 0
    for number in range(6):
        chat: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": f"Question {number} of {stream}?"}
        ]
        text, usage, ids = answered(client, chat, stream)
        if not all(token >= 3 for token in ids[:-1]):
            continue  # it wrote a control token, which no text brings back
        assert "\ufffd" in text, "tokenizing it again would not give these ids"
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        _, after, _ = answered(client, chat, stream)
        assert after.prompt_tokens_details is not None
        reusable = usage.prompt_tokens + usage.completion_tokens - 1
        assert (after.prompt_tokens_details.cached_tokens or 0) >= reusable // 16 * 16
        checked += 1
    assert checked >= 2


def answered(
    client: openai.OpenAI, chat: list[ChatCompletionMessageParam], stream: bool
) -> tuple[str, CompletionUsage, list[int]]:
    """A reply's text, usage and ids."""
    common: dict[str, Any] = {"model": MODEL, "messages": chat, "max_tokens": 60, "temperature": 0}
    common["extra_body"] = {"return_token_ids": True}
    if not stream:
        plain = client.chat.completions.create(**common)
        assert plain.usage is not None
        ids = plain.choices[0].model_dump()["token_ids"]
        return plain.choices[0].message.content or "", plain.usage, ids
    text, usage, ids = "", None, []
    for chunk in client.chat.completions.create(
        **common, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += choice.model_dump().get("token_ids") or []
    assert usage is not None
    return text, usage, ids


def test_a_stream_equals_the_plain_answer(client: openai.OpenAI) -> None:
    # Once before, so that both find the same in the cache.
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
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


def check_chunks(chunks: list[dict[str, Any]], n: int, *, asked: bool, steady: bool) -> None:
    """Everything that clients rely on in the chunks of one chat stream."""
    from openai.types.chat import ChatCompletionChunk

    for chunk in chunks:
        # The generated types, without the leniency of the client's own construction.
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk"
    for name in ("id", "created", "model"):
        assert len({chunk[name] for chunk in chunks}) == 1
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    assert with_choices == (chunks[:-1] if asked else chunks)
    assert all(("usage" in chunk) == steady for chunk in with_choices)
    for index in range(n):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in own[1:])
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[:-1] == [None] * (len(own) - 1) and reasons[-1] in ("stop", "length")
    if steady:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == counts[-2]
    if asked:
        usage = chunks[-1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@pytest.mark.C8
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "options",
    [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
    ids=["plain", "usage", "steady-usage"],
)
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["a", "e"]}])
def test_every_chunk_is_what_the_types_say(
    served: Served, n: int, options: dict[str, bool] | None, more: dict[str, Any]
) -> None:
    from openai.types.chat import ChatCompletion

    common = {"messages": HELLO, "n": n, "seed": 3, "max_tokens": 12, **more}
    body = common | {"stream": True, "stream_options": options}
    lines = served.post("/v1/chat/completions", body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    steady = options is not None and "continuous_usage_stats" in options
    check_chunks(chunks, n, asked=options is not None, steady=steady)
    whole = served.post("/v1/chat/completions", common).json()
    ChatCompletion.model_validate(whole, strict=True)
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if more.get("logprobs"):
            entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
    if options is not None:
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.C8
def test_chunks_of_completions_are_what_the_types_say(served: Served) -> None:
    from openai.types import Completion

    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 6, "logprobs": 2, "seed": 5}
    whole = served.post("/v1/completions", body).json()
    Completion.model_validate(whole, strict=True)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = served.post("/v1/completions", body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert (lines[-2], len({chunk["id"] for chunk in chunks})) == ("data: [DONE]", 1)
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        # The type is that of a whole answer, which always has a reason.
        told = choice | {"finish_reason": choice["finish_reason"] or "stop"}
        Completion.model_validate(chunk | {"choices": [told]}, strict=True)
        assert "usage" not in chunk
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["tokens"]) for choice in whole["choices"]
    )
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own][-1] == choice["finish_reason"]


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
    import openai

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
    while not nodes_idle(served):
        assert time.monotonic() < deadline, "it still computes for nobody"
        time.sleep(0.05)
