"""Loads a model folder into a transformers model whose attention is handed to us, layer by layer.

Owns the registered attention function and the proof, by a pass of one token, that the model calls
it as the paged cache needs it. It knows nothing of blocks: the object that computes attention
travels through the model's forward as the keyword argument ``kvferry_layers``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface
from transformers.utils import logging as transformers_logging

from kvferry.kernels.errors import ModelError
from kvferry.kernels.model_config import ModelFacts

ATTENTION = "kvferry_paged"


class Layers(Protocol):
    """Computes the attention of one pass."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Query ``[heads, T, head_dim]``, key and value ``[kv_heads, T, head_dim]``, after rope.

        Returns ``[T, heads, head_dim]``.
        """
        ...


class CausalModel:
    """A loaded model; calling it runs one packed pass."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._device = device

    def forward(
        self, tokens: list[int], positions: list[int], rows: list[int], layers: Layers
    ) -> torch.Tensor:
        """The logits ``[len(rows), vocab_size]`` of the packed `tokens` at the indices `rows`.

        Without rows the head is not computed at all.
        """
        call = {
            "input_ids": torch.tensor([tokens], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
            "kvferry_layers": layers,
        }
        if not rows:
            self._decoder(**call)
            return torch.empty(0, self._model.config.vocab_size)
        keep = torch.tensor(rows, device=self._device)
        return self._model(**call, logits_to_keep=keep).logits[0]  # type: ignore[no-any-return]


def load_model(facts: ModelFacts, device: torch.device) -> CausalModel:
    """Reads the weights (safetensors only, from the folder only) and proves the model usable.

    ModelError if weights are missing or do not fit, or if the model's layers ask of attention what
    the paged cache does not do.
    """
    AttentionInterface.register(ATTENTION, _attention)
    with _quiet():
        model = _from_pretrained(facts)
    if model.config._attn_implementation != ATTENTION:
        raise _refusal(facts, "it does not accept another attention function")
    model.requires_grad_(False).eval().to(device)
    causal = CausalModel(model, device)
    _prove(causal, facts)
    return causal


def _from_pretrained(facts: ModelFacts) -> Any:
    try:
        model, info = facts.model_class.from_pretrained(
            facts.folder,
            config=facts.config,
            dtype=facts.dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{facts.folder}: the weights cannot be loaded: {error}") from error
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"{facts.folder}: {len(info['missing_keys'])} weights missing: {names}")
    return model


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    kvferry_layers: Any,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with a leading batch dimension of 1 everywhere."""
    if isinstance(kvferry_layers, _Probe):
        kvferry_layers.note(module, attention_mask, rest)
    layer = module.layer_idx
    output = kvferry_layers.attend(layer, query[0], key[0], value[0], scaling)
    return output[None], None


class _Probe:
    """Layers that record what they are asked for and return zeros."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.layers: list[int] = []
        self.reasons: list[str] = []

    def note(self, module: Any, attention_mask: torch.Tensor | None, rest: dict[str, Any]) -> None:
        window = rest.get("sliding_window")
        if attention_mask is not None:
            self.reasons.append("its attention brings a mask of its own")
        if not getattr(module, "is_causal", True) or rest.get("is_causal") is False:
            self.reasons.append("its attention is not causal")
        if rest.get("softcap"):
            self.reasons.append(f"its attention is soft-capped ({rest['softcap']})")
        if rest.get("s_aux") is not None:
            self.reasons.append("its attention has sinks")
        if window is not None and window < self._facts.max_model_len:
            self.reasons.append(f"its attention slides over {window} tokens")

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        facts = self._facts
        self.layers.append(layer)
        wanted = (facts.kv_heads, 1, facts.head_dim)
        if key.shape != wanted or value.shape != wanted:
            found = f"keys {list(key.shape)} and values {list(value.shape)}"
            self.reasons.append(f"layer {layer} has {found}, not {list(wanted)}")
        if query.shape != (facts.heads, 1, facts.head_dim):
            self.reasons.append(f"layer {layer} has queries {list(query.shape)}")
        return torch.zeros_like(query).transpose(0, 1)


def _prove(model: CausalModel, facts: ModelFacts) -> None:
    probe = _Probe(facts)
    try:
        with torch.inference_mode():
            logits = model.forward([0], [0], [0], probe)
            model.forward([0], [0], [], probe)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise _refusal(facts, f"a pass of one token fails: {error}") from error
    if probe.layers != [*range(facts.num_layers)] * 2:
        raise _refusal(facts, f"its layers call attention as {probe.layers}")
    if logits.shape != (1, facts.vocab_size):
        raise _refusal(facts, f"its logits are {list(logits.shape)}, not [1, {facts.vocab_size}]")
    for reason in probe.reasons:
        raise _refusal(facts, reason)


def _refusal(facts: ModelFacts, reason: str) -> ModelError:
    return ModelError(f"{facts.folder}: {facts.config.model_type} cannot be served: {reason}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or reports while loading: what matters of them becomes an error."""
    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
