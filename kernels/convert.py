"""GGUF to a model folder: the weights as they are for the native engine, and in float32 for others.

The result has config, weights, tokenizer, chat template and generation config, and appears under
its name only when it is complete. Run as ``python -m kvferry.kernels.convert SOURCE TARGET``. This
module knows nothing of where models are found or cached.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvferry.kernels.engines.native import GGUF_WEIGHTS
from kvferry.kernels.errors import ModelError, NotNative
from kvferry.kernels.native.architecture import read_architecture
from kvferry.kernels.native.sources import GgufSource, shapes
from kvferry.kernels.native.weights import pack_weights

DIGIT_SPLITTING = ("codeshell", "command-r", "exaone", "refact", "smollm", "starcoder")
"""Values of `tokenizer.ggml.pre` under which llama.cpp makes every digit a piece of its own."""


def convert_gguf(source: Path, target: Path) -> None:
    """Writes the model of the GGUF file `source` as the new folder `target`.

    ModelError if `target` exists, or `source` is no GGUF file of a family that transformers reads.
    Another process may convert to the same target at the same time: one result stays.
    """
    if target.exists():
        raise ModelError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(source, folder)
        _publish(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def _convert(source: Path, folder: Path) -> None:
    # One folder and one file name is how transformers addresses a GGUF file.
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    with _step("reading the tokenizer"), _as_model_error(source):
        metadata = read_gguf_metadata(str(source))[0]
        config = AutoConfig.from_pretrained(source.parent, **where)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        if metadata.get("tokenizer.ggml.pre") in DIGIT_SPLITTING:
            _split_digits(tokenizer.backend_tokenizer)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.init_kwargs.pop("local_files_only", None)  # would be saved as if it were its own
        tokenizer.save_pretrained(folder)
    with _step("dequantising"), _as_model_error(source), contextlib.redirect_stderr(io.StringIO()):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        tensors = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
            str(source), return_tensors=True, model_to_load=_shallow(model, 1)
        )["tensors"]
    with _step("writing float32 weights"):
        save_file(
            _complete(model, tensors, source),
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        config.architectures = [type(model).__name__]
        config.dtype = torch.float32
        config.save_pretrained(folder)
        _generation_config(config, metadata).save_pretrained(folder)
    _pack_as_it_is(source, folder)


def _pack_as_it_is(source: Path, folder: Path) -> None:
    """Beside the float32 weights those of the file, for the native engine, if it serves such."""
    try:
        found = read_architecture(folder, 1)  # whether it serves the longest sequence is seen later
    except NotNative:
        return
    with _step("packing the weights as they are"):
        pack_weights(folder / GGUF_WEIGHTS, GgufSource(source, found), shapes(found), "gguf")


def _shallow(module: Any, depth: int) -> SimpleNamespace:
    """What transformers asks of a model to map names, without all its submodules: for each of them
    it would build the whole table of names again, which takes most of the time."""
    children = module.named_children() if depth else ()
    return SimpleNamespace(
        config=getattr(module, "config", None),
        state_dict=module.state_dict,
        named_children=lambda: [(name, _shallow(child, depth - 1)) for name, child in children],
    )


def _complete(model: Any, tensors: dict[str, Any], source: Path) -> dict[str, torch.Tensor]:
    """The weights as float32, after a check that the model lacks none but those it ties."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    weights: dict[str, torch.Tensor] = {}
    for name, wanted in model.state_dict().items():
        found = tensors.get(name)
        if found is None and name in tied:
            continue
        if found is None:
            raise ModelError(f"{source}: weight {name} is missing")
        if found.shape != wanted.shape:
            raise ModelError(f"{source}: {name} is {list(found.shape)}, not {list(wanted.shape)}")
        weights[name] = found.to(torch.float32).contiguous()
    return weights


def _split_digits(tokenizer: Tokenizer) -> None:
    """Splits digits off before all else, as the `pre` of the file says and transformers forgets:
    it matters to the spaces before a number."""
    splitter = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, tokenizer.pre_tokenizer])


def _generation_config(config: Any, metadata: Mapping[str, Any]) -> Any:
    """Every id that ends an answer: end of sequence, of turn and of message."""
    known = config.eos_token_id
    ids = [*known] if isinstance(known, list) else [known]
    ids += [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")]
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id,
        eos_token_id=list(dict.fromkeys(int(i) for i in ids if i is not None)),
        pad_token_id=config.pad_token_id,
    )


@contextlib.contextmanager
def _as_model_error(source: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the readers of a broken file raise whatever they stumble on
        raise ModelError(f"{source}: not a GGUF model that can be converted: {error}") from error


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """A line on stderr when the step begins, and one with its time when it is done."""
    began = time.monotonic()
    sys.stderr.write(f"convert: {what} …\n")
    yield
    sys.stderr.write(f"convert: {what}: {time.monotonic() - began:.1f} s\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvferry.kernels.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="the GGUF file")
    parser.add_argument("target", type=Path, help="the folder to create")
    arguments = parser.parse_args()
    try:
        convert_gguf(arguments.source, arguments.target)
    except ModelError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
