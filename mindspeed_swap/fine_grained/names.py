"""Names of what a layer consists of: Megatron's, the aliases that other swap configurations use, and patterns of both.

A pattern is dotted: each of its levels must match a whole level of the name (``re.fullmatch``), so ``attention`` is a
part of the layer and ``attention.flash_attention`` a part of that part. A dot before ``*``, ``+``, ``?`` or ``{`` is
the wildcard, every other one ends a level; ``\\.`` does too.
"""
from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# One level of a name each. On the right Megatron's.
ALIASES = {
    "attention": "self_attention",
    "flash_attention": "core_attention",
    "feed_forward": "mlp",
    "attention_norm": "input_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "w_qkv": "linear_qkv",
    "wo": "linear_proj",
    "w1": "linear_fc1",
    "w2": "linear_fc2",
}
_LEVEL_END = re.compile(r"\\\.|\.(?![*+?{])")
_WORD = re.compile(r"\w+")


def levels(pattern: str) -> list[str]:
    """Raises ValueError saying what is wrong with it."""
    parts = _LEVEL_END.split(pattern)
    for part in parts:
        if not part:
            raise ValueError(f"{pattern!r} has an empty level" if pattern else "is empty")
        try:
            re.compile(part)
        except re.error as error:
            raise ValueError(f"{pattern!r}: {part!r} is no regular expression: {error}") from None
    return parts


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Those of Megatron's names (``self_attention.core_attention``) that the pattern means, in their order."""
    parts = [re.compile(part) for part in levels(pattern)]
    found = []
    for name in names:
        own = name.split(".")
        if len(own) == len(parts) and all(
            any(part.fullmatch(word) for word in also_called(level)) for part, level in zip(parts, own, strict=True)
        ):
            found.append(name)
    return found


def also_called(level: str) -> list[str]:
    """One level of a name, and its aliases."""
    return [level, *(alias for alias, name in ALIASES.items() if name == level)]


def is_word(pattern: str) -> bool:
    """True if it can mean one name only, so that a log can show it as it was written."""
    return all(_WORD.fullmatch(part) for part in levels(pattern))


def in_megatron(pattern: str) -> str:
    """The pattern with Megatron's words for the aliases in it."""
    return ".".join(ALIASES.get(level, level) for level in levels(pattern))


def near(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that might have been meant, at least the parts of the layer."""
    names = list(dict.fromkeys(names))
    known = {name: name for name in names}
    for name in names:
        for alias, level in ALIASES.items():
            parts = name.split(".")
            if level in parts:
                known.setdefault(".".join(alias if part == level else part for part in parts), name)
    wanted = ".".join(_LEVEL_END.split(pattern))
    close = difflib.get_close_matches(wanted, known, 3)
    same_end = [name for name in known if name.rpartition(".")[2] == wanted.rpartition(".")[2]]
    return list(dict.fromkeys(same_end + close))[:5] or [name for name in names if "." not in name]
