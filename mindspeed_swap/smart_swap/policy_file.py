"""Reads a policy file. It is Python, and it is EXECUTED: what it says is what you run.

Three shapes are understood: a class SwapPolicyConfig that sets ``self.name = value`` in ``__init__`` (what it leaves
out stays as shipped), the same as MindSpeed ships it, and bare lines ``self.name = value``. Imports of modules that are
not there are left out, and so are MindSpeed's own, which would build its C++ parts.
"""
from __future__ import annotations

import ast
import difflib
import re
import textwrap
import traceback
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_swap.errors import SettingError
from mindspeed_swap.smart_swap.knobs import AUTO, KNOBS, SwapPolicyPref, fault

SHIPPED = Path(__file__).with_name("swap_policy_config.py")
_NEVER_IMPORTED = ("mindspeed", "torch_npu")
# The keys of the YAML file of ``--swap-config``.
_YAML = re.compile(r"^\s*(swap_config|layer_swap|op_swap|default_prefetch)\s*:", re.MULTILINE)


def read_policy_file(path: str | Path) -> dict[str, Any]:
    """The settings that the file makes, by name, checked. Raises SettingError naming file and line."""
    try:
        source = textwrap.dedent(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--swap-policy-config {path}: cannot be read: {error}") from None
    if Path(path).suffix in (".yaml", ".yml") or _YAML.search(source):
        raise SettingError(f"--swap-policy-config {path}: this is a swap_config YAML: did you mean --swap-config?")
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        raise SettingError(f"{path}:{error.lineno}: {error.msg}") from None
    lines = _lines(tree)
    values = {}
    for name, value in _run(tree, str(path)).items():
        where = f"{path}:{lines.get(name, 1)}"
        if name not in KNOBS:
            near = difflib.get_close_matches(name, KNOBS, 1)
            raise SettingError(f"{where}: {name} is unknown" + (f": did you mean {near[0]}?" if near else ""))
        if isinstance(value, Enum) and value.name in SwapPolicyPref.__members__:
            value = SwapPolicyPref[value.name]  # the file has an Enum of its own
        if problem := fault(name, value):
            raise SettingError(f"{where}: {problem}")
        values[name] = value
    return values


def _run(tree: ast.Module, path: str) -> dict[str, Any]:
    tree = ast.fix_missing_locations(_WithoutImports().visit(tree))
    bare = type("SwapPolicyConfig", (), {})()
    names: dict[str, Any] = {
        "__name__": "swap_policy_config", "__file__": path, "self": bare, "AUTO": AUTO,
        "SwapPolicyPref": SwapPolicyPref,
    }  # fmt: skip
    try:
        exec(compile(tree, path, "exec"), names)
        config = names.get("swap_policy_config")
        if config is None and "SwapPolicyConfig" in names:
            config = names["SwapPolicyConfig"]()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = frames[-1].lineno if frames else 1
        raise SettingError(f"{path}:{line}: {type(error).__name__}: {error}") from None
    return {**vars(bare), **(vars(config) if config is not None else {})}


def _lines(tree: ast.Module) -> dict[str, int]:
    """Line of the last ``self.name = ...`` for each name."""
    return {
        target.attr: target.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }


class _WithoutImports(ast.NodeTransformer):
    """Leaves out what cannot, or must not, be imported."""

    def visit_Import(self, node: ast.Import) -> ast.AST:
        node.names = [alias for alias in node.names if _importable(alias.name)]
        return node if node.names else ast.copy_location(ast.Pass(), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return node if node.level == 0 and _importable(node.module or "") else ast.copy_location(ast.Pass(), node)


def _importable(module: str) -> bool:
    first = module.partition(".")[0]
    try:
        return first not in _NEVER_IMPORTED and find_spec(first) is not None
    except (ImportError, ValueError):
        return False
