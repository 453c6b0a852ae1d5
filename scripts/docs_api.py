"""docs/api.md: what is public, with its signatures and docstrings. The caller has this checkout on ``sys.path``."""
from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

PUBLIC = (
    "mindspeed_swap", "mindspeed_swap.megatron_adaptor", "mindspeed_swap.compat", "mindspeed_swap.adaptive_memory",
    "mindspeed_swap.smart_swap", "mindspeed_swap.virtual_optimizer.swap_tensor", "mindspeed_swap.core.accelerator",
)  # fmt: skip
# Importing these has an effect: that is what they are for.
_ONLY_IMPORTED = ("mindspeed_swap.megatron_adaptor", "mindspeed_swap.compat")


def api() -> str:
    parts = []
    for name in PUBLIC:
        parts.append(f"## `{name}`\n\n{_module_doc(name)}")
        if name in _ONLY_IMPORTED:
            continue
        module = importlib.import_module(name)
        for public in sorted(module.__all__):
            value = getattr(module, public)
            if not getattr(value, "__module__", "").startswith("mindspeed_swap") or not hasattr(value, "__name__"):
                continue  # constants and aliases: the module's text says what they are
            parts.append(f"### `{public}{_signature(value)}`\n\n{_prose(value)}")
            if inspect.isclass(value) and issubclass(value, enum.Enum):
                parts[-1] = f"### `{public}`\n\nOne of " + ", ".join(f"`{member}`" for member in value) + "."
            if inspect.isclass(value) and inspect.isabstract(value):
                parts += [
                    f"- `{method}{_signature(function)}`  {_prose(function, one_line=True)}".rstrip()
                    for method, function in vars(value).items()
                    if inspect.isfunction(function) and not method.startswith("_")
                ]
    return re.sub(r"\n\n(?=- `\w+\()", "\n", "\n\n".join(parts)) + "\n"


def _module_doc(name: str) -> str:
    file = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
    return _rst((ast.get_docstring(ast.parse(Path(file).read_text(encoding="utf-8"))) or "").strip())


def _prose(value: Any, *, one_line: bool = False) -> str:
    text = _rst(inspect.getdoc(value) or "")
    return " ".join(text.split()) if one_line else text


def _rst(text: str) -> str:
    return text.replace("``", "`")


def _signature(value: Any) -> str:
    if inspect.isclass(value) and not value.__module__.startswith("mindspeed_swap.hooks"):
        return ""
    try:
        return re.sub(r"'", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""
