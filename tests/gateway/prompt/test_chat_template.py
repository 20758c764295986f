"""Rendering is byte-equal to `transformers`, and a refusing template is answered in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.prompt.chat_template import ChatTemplate, TemplateRefused, load_template
from kvferry.gateway.prompt.conversation import Conversation, read_conversation, render
from kvferry.gateway.protocols.chat import ChatRequest
from kvferry.gateway.protocols.common import decode
from kvferry.gateway.tokenizer.control_text import ControlText
from kvferry.kvstore.errors import ConfigError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- set date = strftime_now('%Y') %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date + '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    "
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
    "{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}"
    "{{- ' ' + message['content'] + eos_token}}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{'<start_of_turn>model\n'}}{% endif %}"
)
WITH_EVERYTHING = (
    "{%- set ns = namespace(seen=0, name='x') %}\n"
    "{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "    {% set ns.seen = ns.seen + 1 %}\n"
    "{{ message.role }}|{{ message.content }}|{{ message.tool_calls | tojson(indent=2) "
    "if message.tool_calls }}|\n"
    "  {% generation %}{{ message.reasoning_content }}{% endgeneration %}\n"
    "    {% if ns.seen > 3 %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{{ dict(a='<é>') | tojson }} {{ enable_thinking }} {{ ns.seen }}"
)
TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "everything": WITH_EVERYTHING,
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "  spaces \n"},
        {"role": "assistant", "content": "née <b>&</b> 😀", "reasoning_content": "hm"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"é": 1}}}],
        },
    ],
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *CHATS[1]]


def ours(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, SPECIALS).render(chat, **options)


def theirs(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    options |= SPECIALS
    rendered: tuple[list[str], object] = render_jinja_template(
        [chat], chat_template=source, **options
    )  # type: ignore[assignment]
    return rendered[0][0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["short", "turns", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no-prompt"])
def test_equal_to_transformers(name: str, chat: list[dict[str, Any]], prompt: bool) -> None:
    source = TEMPLATES[name]
    variables = {"enable_thinking": False}
    expected = theirs(source, chat, add_generation_prompt=prompt, **variables)
    assert ours(source, chat, add_generation_prompt=prompt, variables=variables) == expected


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
@pytest.mark.parametrize("end", ["", " ", "\n\n"], ids=["plain", "space", "lines"])
def test_continued_message_equal_to_transformers(name: str, end: str) -> None:
    chat = [*CHATS[0], {"role": "assistant", "content": "Once upon" + end}]
    expected = theirs(TEMPLATES[name], chat, continue_final_message=True)
    found = ours(TEMPLATES[name], chat, add_generation_prompt=False, continue_final_message=True)
    assert found == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ours(source, CHATS[0])


def test_broken_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})


# -- where templates lie ---------------------------------------------------------------------------


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_template_file_wins_over_config(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "config", "bos_token": {"content": "<B>"}})
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    template = load_template(tmp_path, None)
    assert template is not None
    assert template.render([]) == "file <B>"


def test_named_templates_and_override(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, {"chat_template": named})
    (tmp_path / "mine.jinja").write_text("mine")
    found, mine = load_template(tmp_path, None), load_template(tmp_path, tmp_path / "mine.jinja")
    assert found is not None and mine is not None
    assert (found.render([]), mine.render([])) == ("d", "mine")


def test_no_template(tmp_path: Path) -> None:
    assert load_template(tmp_path, None) is None


# -- conversations ---------------------------------------------------------------------------------


def conversation(messages: str, **options: Any) -> Conversation:
    request = decode(f'{{"messages": {messages}}}'.encode(), ChatRequest)
    options = {"add_generation_prompt": None, "continue_final_message": None} | options
    return read_conversation(request.messages, variables={}, **options)


def rendered(source: str, chat: Conversation) -> str:
    return render(chat, ChatTemplate(source, SPECIALS), ControlText({})).text


@pytest.mark.C6
@pytest.mark.parametrize(
    "content",
    ["null", '""', "[]", '[{"type": "text", "text": ""}]'],
    ids=["null", "empty", "no-parts", "empty-part"],
)
def test_all_spellings_of_no_content_are_one(content: str) -> None:
    calls = '[{"id": "1", "function": {"name": "f", "arguments": "{\\"a\\":1}"}}]'
    text = f'[{{"role": "assistant", "content": {content}, "tool_calls": {calls}}}]'
    (message,) = conversation(text).messages
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.C6
def test_arguments_render_alike_however_they_are_spelled() -> None:
    first = conversation(
        '[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\": 1}"}}]}]'
    )
    second = conversation(
        '[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":1}"}}]}]'
    )
    assert rendered(WITH_EVERYTHING, first) == rendered(WITH_EVERYTHING, second)


@pytest.mark.C6
def test_parts_are_joined_and_developer_is_system() -> None:
    chat = conversation('[{"role": "developer", "content": [{"type":"text","text":"a"}, "b"]}]')
    assert chat.messages == ({"role": "system", "content": "a\nb"},)


@pytest.mark.C6
@pytest.mark.parametrize("name", TEMPLATES)
def test_late_system_message_keeps_its_place(name: str) -> None:
    messages = (
        '[{"role":"user","content":"ONE"}, {"role":"assistant","content":"TWO"},'
        '{"role":"user","content":"THREE"}, {"role":"system","content":"FOUR"}]'
    )
    text = rendered(TEMPLATES[name], conversation(messages))
    assert text.index("ONE") < text.index("TWO") < text.index("THREE") < text.index("FOUR")


def test_system_goes_into_the_user_turn_only_where_the_template_refuses_it() -> None:
    chat = Conversation(tuple(WITH_SYSTEM))
    assert "<|im_start|>system\nBe brief." in rendered(SMOLLM2, chat)
    assert "<start_of_turn>user\nBe brief.\n\n  spaces<end_of_turn>" in rendered(GEMMA, chat)


@pytest.mark.C6
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("[]", "messages"),
        ('[{"role": "wizard", "content": "x"}]', "messages[0].role"),
        ('[{"role":"user","content":[{"type":"image_url"}]}]', "messages[0].content[0].type"),
        ('[{"role":"user","content":[{"type":"text"}]}]', "messages[0].content[0].text"),
    ],
)
def test_meaningless_messages_are_named(messages: str, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        conversation(messages)
    assert refused.value.param == param


@pytest.mark.C6
def test_a_template_that_refuses_every_form_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="must alternate"):
        rendered(GEMMA, conversation('[{"role": "assistant", "content": "x"}]'))


def test_continue_and_prompt_exclude_each_other() -> None:
    messages = '[{"role": "assistant", "content": "x"}]'
    with pytest.raises(BadRequest, match="exclude"):
        conversation(messages, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(BadRequest, match="assistant"):
        conversation('[{"role": "user", "content": "x"}]', continue_final_message=True)
