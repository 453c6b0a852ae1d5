"""Every error text of the product, from its sources."""
from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_RAISED = ("SettingError", "NoPlan", "Infeasible", "unusable")


def error_texts() -> list[str]:
    """One template per text that a user can get as an error; what is filled in is ``…``. Sorted, no duplicates.

    Of ``document.error(key, text)`` the text counts: file, line and key stand before it. Reasons of COMPAT are not in
    it: compatibility.md has them.
    """
    found = set()
    for folder in ("mindspeed_swap", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "mindspeed_swap" / "patches"):
                continue  # a link in a checkout
            found.update(_texts_of(path))
    return sorted(text for text in found if re.search(r"[A-Za-z]{3}", text))


def _texts_of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants: dict[str, str] = {}
    # Constants of other modules, by the imports of this one.
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindspeed_swap"):
            texts = {alias.asname or alias.name: _imported(node.module, alias.name) for alias in node.names}
            constants |= {name: text for name, text in texts.items() if text}
    for _ in range(2):  # a text may be made of one that stands below it
        own: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                fixed = isinstance(node.value, (ast.Constant, ast.JoinedStr))
                own.setdefault(node.targets[0].id, set()).add(_template(node.value, constants) if fixed else "…")
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                own.setdefault(node.target.id, set()).add("…")
        constants |= {name: next(iter(texts)) for name, texts in own.items() if len(texts) == 1}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _RAISED:
            text = node.args[-1] if name == "Infeasible" else node.args[0]
        elif name == "append" and path.name == "arguments.py":
            text = node.args[0]  # of what was found to be wrong, which is raised together
        elif name in ("error", "_error") and len(node.args) == 2:
            text = node.args[1]
        else:
            continue
        yield " ".join(_template(text, constants).split()).strip(" :;")


@functools.cache
def _imported(module: str | None, name: str) -> str:
    """A text constant of one of our modules, or "". Read, not imported."""
    assert module
    parts = module.split(".")[1:]
    base = ROOT / "patches" if parts[:1] == ["patches"] else ROOT / "mindspeed_swap"
    file = base.joinpath(*(parts[1:] if parts[:1] == ["patches"] else parts)).with_suffix(".py")
    if not file.is_file():
        file = base.joinpath(*(parts[1:] if parts[:1] == ["patches"] else parts)) / "__init__.py"
    if not file.is_file():
        return ""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value = node.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return ""


def _template(node: ast.AST, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        text = "".join(_template(part, constants) for part in node.values)
        return re.sub(r"…(\s*…)+", "…", text)
    if isinstance(node, ast.FormattedValue):
        return constants.get(node.value.id, "…") if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.Name):
        return constants.get(node.id, "…")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left, constants)  # what is added is a hint that is not always there
    return "…"
