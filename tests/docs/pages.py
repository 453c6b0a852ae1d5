"""The documentation as text: its pages, their code blocks, links and flags."""
from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w`'\"/.-])--[a-z][a-z0-9-]*[a-z0-9]|(?<=[`'\"])--[a-z][a-z0-9-]*[a-z0-9]")


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [text for found, text in _FENCE.findall(path.read_text(encoding="utf-8")) if found == language]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def flags(text: str) -> set[str]:
    return set(_FLAG.findall(text))


@cache
def generator(name: str = "docs") -> ModuleType:
    """scripts/docs.py, or what it is made of."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"scripts/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module
