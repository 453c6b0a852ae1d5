"""Reads a YAML file as ``yaml.safe_load`` does, remembers the line of everything, and refuses what is made to harm:
huge files, deep nesting, aliases that multiply. A key given twice is an error; ``safe_load`` would drop the first."""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_swap.errors import SettingError

FLAG = "--swap-config"
# Generous for settings; large enough for a whole training configuration with ours in it.
MOST_BYTES = 256 << 10
MOST_VALUES = 20_000  # aliases counted as often as they are used
DEEPEST = 40

# YAML 1.1 reads 010 as 8 and 1:30 as 90.
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_INT = "tag:yaml.org,2002:int"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"


@dataclass(frozen=True, slots=True)
class Document:
    """``lines``: key (``a.b[0].c``) -> line, from 1."""

    path: str
    value: Any
    lines: dict[str, int]

    def error(self, key: str, text: str) -> SettingError:
        """Names file, line and key. What is missing is on the line of what it is missing from."""
        known = key
        while known and known not in self.lines:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        return SettingError(f"{FLAG} {self.path}:{self.lines.get(known, 1)}: {key}: {text}")


def read_yaml(path: str) -> Document:
    """Raises SettingError."""
    import yaml  # here: whoever does not use --swap-config need not have it

    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SettingError(f"{FLAG} {path}: cannot be read: {error.strerror}") from None
    if len(raw) > MOST_BYTES:
        raise SettingError(f"{FLAG} {path}: larger than {MOST_BYTES >> 10} KiB: this is no swap configuration")
    try:
        loader = yaml.SafeLoader(raw.decode("utf-8-sig"))
        node = loader.get_single_node()
        walk = _Walk(path, loader)
        return Document(path, None if node is None else walk.value(node, "", 0), walk.lines)
    except UnicodeDecodeError as error:
        raise SettingError(f"{FLAG} {path}: not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark else ""
        raise SettingError(f"{FLAG} {path}{where}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise SettingError(f"{FLAG} {path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingError(f"{FLAG} {path}: nested too deeply") from None


class _Walk:
    """From the tree of the document, in which an alias is the same node again, to plain values."""

    def __init__(self, path: str, loader: Any) -> None:
        self._path, self._loader, self._count = path, loader, 0
        self.lines: dict[str, int] = {}

    def value(self, node: Any, key: str, depth: int) -> Any:
        line = node.start_mark.line + 1
        # An alias may stand for something further up: the line is that of where it is used.
        self.lines.setdefault(key, line)
        self._count += 1
        if self._count > MOST_VALUES or depth > DEEPEST:
            what = f"more than {MOST_VALUES} values" if self._count > MOST_VALUES else "nested too deeply"
            raise SettingError(f"{FLAG} {self._path}:{line}: {what}, aliases counted as often as they are used")
        if node.id == "scalar":
            if node.tag == _INT and not _PLAIN_INT.fullmatch(node.value):
                raise SettingError(f"{FLAG} {self._path}:{line}: {node.value}: write it as a plain decimal number")
            try:
                return self._loader.construct_object(node)
            except ValueError as error:  # 2020-99-99 is a date for YAML
                raise SettingError(f"{FLAG} {self._path}:{line}: {node.value}: {error}") from None
        if node.tag not in _PLAIN_TAGS:
            raise SettingError(f"{FLAG} {self._path}:{line}: not YAML that is read here: tag {node.tag}")
        if node.id == "sequence":
            return [self.value(child, f"{key}[{i}]", depth + 1) for i, child in enumerate(node.value)]
        return self._mapping(node, key, depth)

    def _mapping(self, node: Any, key: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for name_node, child in node.value:
            line, name = name_node.start_mark.line + 1, name_node.value
            child_key = f"{key}.{name}" if key else name
            if name_node.id != "scalar":
                raise SettingError(f"{FLAG} {self._path}:{line}: a key must be a plain word")
            if name in found:
                first = self.lines[child_key]
                raise SettingError(f"{FLAG} {self._path}:{line}: {child_key}: given twice, first on line {first}")
            self.lines[child_key] = line
            value = self.value(child, child_key, depth + 1)
            if name_node.tag != _MERGE:
                found[name] = value
                continue
            for each in value if isinstance(value, list) else [value]:  # of several mappings the first wins
                if not isinstance(each, dict):
                    raise SettingError(f"{FLAG} {self._path}:{line}: <<: expected a mapping")
                merged = {**each, **merged}
        return {**merged, **found}
