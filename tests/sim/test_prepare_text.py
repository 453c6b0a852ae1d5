"""scripts/prepare_text.py: the bytes come back, and what cannot be prepared is told in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from simulated_run import SCRIPTS


@pytest.fixture(scope="module")
def prepare():
    spec = importlib.util.spec_from_file_location("prepare_text", SCRIPTS / "prepare_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def documents(prefix: Path) -> list[bytes]:
    return [np.asarray(document).astype(np.uint8).tobytes() for document in IndexedDataset(str(prefix))]


def test_bytes_come_back(prepare, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_bytes("zwei, größer".encode())
    (folder / "inner" / "c.md").write_bytes(b"three\n")
    (folder / "a.txt").write_bytes(bytes(range(1, 256)))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "image.bin").write_bytes(b"\0\1\2")
    (folder / ".hidden").write_bytes(b"not this")
    assert prepare([str(folder), "--output", str(tmp_path / "out" / "data")]) == 0
    assert documents(tmp_path / "out" / "data") == [bytes(range(1, 256)), "zwei, größer".encode(), b"three\n"]


def test_default_is_prose_of_python(prepare, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert prepare(["--output", str(tmp_path / "topics")]) == 0
    from pydoc_data.topics import topics

    assert documents(tmp_path / "topics") == [topics[name].encode() for name in sorted(topics)]
    assert "vocabulary 256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", b"", "no text in the input"),
        ("binary.txt", b"a\0b", "not a text file"),
    ],
)
def test_errors(prepare, tmp_path: Path, capsys: pytest.CaptureFixture, name: str, content, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert prepare([str(tmp_path / name), "--output", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.idx").exists()


def test_no_sentencepiece_model(prepare, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert prepare(["--sentencepiece", str(tmp_path / "no.model"), "--output", str(tmp_path / "out")]) == 1
    assert "sentencepiece" in capsys.readouterr().err
