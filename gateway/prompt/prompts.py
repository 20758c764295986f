"""From what a client wrote to prompts that a node can take: ids, block keys, room to answer.

Owns the last checks before any compute: length against the model's limit, ids against its
vocabulary; and the memory by which only the new part of a prompt costs much. It knows no node, only
the shape all of them share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.gateway.errors import BadRequest, ContextLength, NotSupported
from kvferry.gateway.output.choice import Reply
from kvferry.gateway.params import MAX_CHOICES, Params
from kvferry.gateway.prompt.chat_ids import ChatEncoder, ChatIds, PromptEnd
from kvferry.gateway.prompt.conversation import Conversation, render
from kvferry.gateway.prompt.memory import KeyChain
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.tokenizer.tokenizer import CannotEncode
from kvferry.kvstore.keys import pack_tokens, root_key, tenant_key, unpack_tokens

KEY_CHAIN_BYTES = 32 << 20
"""A kilobyte for each thousand tokens, with blocks of 16."""

CompletionPrompt = str | Sequence[str | int | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What all nodes of a deployment have in common."""

    fingerprint: Mapping[str, str]
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Prompt:
    size: int
    packed: bytes
    tenant: bytes
    root: bytes
    keys: bytes
    max_tokens: int
    """What was asked for, or the room that is left."""
    end: PromptEnd | None = None
    """Where a chat's reply goes on."""

    @property
    def ids(self) -> memoryview:
        return memoryview(self.packed).cast("i")


class PromptMaker:
    """Makes prompts of one model, and remembers what was said to make the next ones of.

    Safe to use from several threads.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._encoder = ChatEncoder(model.tokenizer)
        self._keys = KeyChain(KEY_CHAIN_BYTES)

    def remember(self, prompt: Prompt, reply: Reply) -> None:
        """A chat that goes on with this reply shall get the very ids that were generated."""
        if prompt.end is not None:
            self._encoder.remember(prompt.end, reply)

    @property
    def remembered_bytes(self) -> int:
        """What is remembered, in bytes; each kind of it within its own bound."""
        return self._encoder.remembered_bytes + self._keys.remembered_bytes

    def forget(self, tenant: str) -> None:
        """Drops what is remembered of a tenant's prompts and replies."""
        self._encoder.forget(tenant)
        self._keys.forget(tenant)

    def chat_ids(self, conversation: Conversation, tenant: str) -> list[int]:
        """The ids that `chat` would send to a node; BadRequest if there are none."""
        return unpack_tokens(self._encode(conversation, tenant, None).packed)

    def chat(self, conversation: Conversation, params: Params, tenant: str, shape: Shape) -> Prompt:
        """The prompt of a conversation; BadRequest if it has none or is too long."""
        made = self._encode(conversation, tenant, params.cache_salt)
        return self._prompt(made.packed, params, tenant, shape, "messages", made.end)

    def completions(
        self,
        prompt: CompletionPrompt,
        add_special_tokens: bool,
        params: Params,
        tenant: str,
        shape: Shape,
    ) -> list[Prompt]:
        """The prompts of a completions request, one for each text or list of ids."""
        parts = parts_of(prompt)
        if len(parts) * params.n > MAX_CHOICES:
            raise BadRequest(
                f"{len(parts)} prompts with n={params.n} are more than {MAX_CHOICES} choices.",
                param="prompt",
            )
        prompts = []
        for part in parts:
            packed = pack_tokens(self._part_ids(part, add_special_tokens))
            prompts.append(self._prompt(packed, params, tenant, shape, "prompt"))
        return prompts

    # -- the work ----------------------------------------------------------------------------------

    def _encode(self, conversation: Conversation, tenant: str, salt: str | None) -> ChatIds:
        model = self._model
        if model.template is None:
            raise NotSupported(
                f"The model {model.name} has no chat template: use /v1/completions, "
                "or start the server with --chat-template."
            )
        text = render(conversation, model.template, model.tokenizer.control_text)
        try:
            return self._encoder.encode(text, tenant, salt)
        except CannotEncode as error:
            raise BadRequest(str(error), param="messages") from error

    def _part_ids(self, part: str | Sequence[int], add_special_tokens: bool) -> Sequence[int]:
        if isinstance(part, str):
            return self._model.tokenizer.encode(part, add_special_tokens=add_special_tokens)
        size = self._model.vocabulary.size
        if not all(0 <= token < size for token in part):
            raise BadRequest(f"prompt must hold token ids from 0 to {size - 1}.", param="prompt")
        return part

    def _prompt(
        self,
        packed: bytes,
        params: Params,
        tenant: str,
        shape: Shape,
        param: str,
        end: PromptEnd | None = None,
    ) -> Prompt:
        if not packed:
            raise BadRequest("The prompt is empty: it has no tokens.", param=param)
        size = len(packed) // 4
        max_tokens = _room(size, params, shape.max_model_len, param)
        root = root_key(shape.fingerprint, tenant, params.cache_salt)
        keys = self._keys.keys(tenant, root, packed, shape.block_size)
        return Prompt(size, packed, tenant_key(tenant), root, keys, max_tokens, end)


def _room(size: int, params: Params, limit: int, param: str) -> int:
    """How many tokens the answer may have."""
    room = limit - size
    if room < 1:
        raise ContextLength(limit, size, None, param)
    if params.max_tokens is None:
        return room if params.default_max_tokens is None else min(params.default_max_tokens, room)
    if params.max_tokens > room:
        raise ContextLength(limit, size, params.max_tokens, param)
    return params.max_tokens


def parts_of(prompt: CompletionPrompt) -> list[str | Sequence[int]]:
    """A prompt field as a list of texts or lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    parts = [item for item in prompt if not isinstance(item, int)]
    if not parts or len(parts) != len(prompt):
        raise BadRequest(
            "prompt must be a text, a list of texts, a list of token ids, or a list of such lists.",
            param="prompt",
        )
    return parts
