"""Checked: dataclasses from JSON, and fingerprints. The first thing that is wrong is named. Pure; imports no torch."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
}

_TEXT = ("phase", "name")
_FIELD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")


def load_object(text: str, what: str, version: int) -> dict[str, Any]:
    """The JSON object of a file of ours. Raises ValueError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"damaged {what}: {error}") from None
    found = data.get("version") if isinstance(data, dict) else None
    if found != version or isinstance(found, bool):
        raise ValueError(f"{what} version {found}: this release reads version {version}")
    return data


def build(cls: type, data: Any, where: str, **convert: Callable[[Any, str], Any]) -> Any:
    """``cls(**data)``, every field checked by its annotation or converted by the function given for it.

    Raises ValueError naming ``where`` and the first field that is missing, unknown or of another type."""
    if not isinstance(data, dict):
        raise ValueError(f"damaged {where}: expected an object, found {data!r:.60}")
    values: dict[str, Any] = {}
    names = set()
    for item in fields(cls):
        names.add(item.name)
        if item.name not in data:
            if item.default is MISSING and item.default_factory is MISSING:
                raise ValueError(f"damaged {where}: {item.name} is missing")
            continue
        value = data[item.name]
        if item.name in convert:
            values[item.name] = convert[item.name](value, f"{where}: {item.name}")
            continue
        types = _TYPES[str(item.type)]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"damaged {where}: {item.name} is {value!r:.60}, expected {item.type}")
        if isinstance(value, float) and not isfinite(value) or type(value) is int and value < 0:
            raise ValueError(f"damaged {where}: {item.name} is {value}")
        values[item.name] = value
    unknown = [name for name in data if name not in names]
    if unknown:
        raise ValueError(f"damaged {where}: {unknown[0]} is unknown")
    return cls(**values)


def tuple_of(cls: Any) -> Callable[[Any, str], Any]:
    """Converter to a NamedTuple whose fields are int, but for those in ``_TEXT``."""

    def convert(value: Any, where: str) -> Any:
        names: tuple[str, ...] = cls._fields
        if not isinstance(value, list) or len(value) != len(names):
            raise ValueError(f"damaged {where}: {value!r:.60}, expected {len(names)} values")
        for name, item in zip(names, value, strict=True):
            if not isinstance(item, str if name in _TEXT else int) or isinstance(item, bool):
                raise ValueError(f"damaged {where}: {name} is {item!r:.60}")
        return cls(*value)

    return convert


def list_of(one: Callable[[Any, str], Any]) -> Callable[[Any, str], list[Any]]:
    """Converter of a list, each item by ``one``."""

    def convert(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError(f"damaged {where}: expected a list, found {value!r:.60}")
        return [one(item, f"{where}[{i}]") for i, item in enumerate(value)]

    return convert


def first_difference(theirs: str, ours: str, where: str = "this run") -> str:
    """Of two fingerprints "name=value name=value"; "" if they are equal."""
    if theirs == ours:
        return ""
    there, here = dict(_FIELD.findall(theirs)), dict(_FIELD.findall(ours))
    for field in dict.fromkeys([*here, *there]):
        if there.get(field) != here.get(field):
            return f"{field}={there.get(field)}, {where} has {field}={here.get(field)}"
    return f"{theirs!r:.60}, {where} is {ours!r:.60}"
