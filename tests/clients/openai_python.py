"""openai-python's part of `make test-clients`: one JSON line a case.

    python openai_python.py BASE_URL MODEL

It asks only; what the answers must be is judged by whoever started it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai

QUESTION = {"role": "user", "content": "Name three colours of autumn leaves."}
NEXT = {"role": "user", "content": "And three more?"}
STORY = [{"role": "user", "content": "Tell a very long story about a lighthouse."}]


def usage_of(case: str, usage: Any, **more: Any) -> None:
    details = usage.prompt_tokens_details
    say(case, prompt=usage.prompt_tokens, completion=usage.completion_tokens,
        cached=details.cached_tokens if details else None, **more)  # fmt: skip


def say(case: str, **told: Any) -> None:
    print(json.dumps({"case": case, **told}), flush=True)


def main(base_url: str, model: str) -> None:
    client: Any = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=300)
    create = client.chat.completions.create
    common = {"model": model, "temperature": 0, "max_tokens": 60}

    first = create(messages=[QUESTION], **common)
    usage_of("plain", first.usage)
    history = [QUESTION, {"role": "assistant", "content": first.choices[0].message.content}, NEXT]
    usage_of("second", create(messages=history, **common).usage)

    try:
        create(messages=[{"role": "user", "content": "word " * 9000}], **common)
        say("over-length", status=200)
    except openai.APIStatusError as error:
        say("over-length", status=error.status_code, code=error.code)

    stream = create(messages=STORY, stream=True, **common | {"max_tokens": 1000})
    for _, _ in zip(range(4), stream, strict=False):
        pass
    stream.close()
    say("cancelled")

    begun, first_at, usage = time.monotonic(), 0.0, None
    options = {"include_usage": True}
    for chunk in create(messages=STORY, stream=True, stream_options=options, **common):
        if chunk.choices and chunk.choices[0].delta.content and not first_at:
            first_at = time.monotonic()
        usage = chunk.usage or usage
    took = time.monotonic() - first_at
    rate = (usage.completion_tokens - 1) / took if usage else 0.0
    usage_of("streamed", usage, ttft_ms=1000 * (first_at - begun), tokens_per_s=rate)


if __name__ == "__main__":
    main(*sys.argv[1:])
