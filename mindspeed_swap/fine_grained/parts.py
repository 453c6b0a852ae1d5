"""Parts: what the setting means for the layers of one rank. Pure; imports no torch."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_swap.fine_grained.names import in_megatron, matching, near
from mindspeed_swap.fine_grained.schema import Entry, SwapConfig

WHOLE = "all of it"  # in the place of a name, where a layer is swapped as such
# Of a layer, counted from 0: the names of the modules in it.
LayerNames = Mapping[int, Sequence[str]]


@dataclass(slots=True)
class Parts:
    """``names``: by layer. ``chunks``: the layers of each model chunk of this rank, which is in stage ``stage``."""

    config: SwapConfig
    names: LayerNames
    chunks: Sequence[Sequence[int]]
    stage: int = 0
    full: set[int] = field(init=False)  # layers that are recomputed as a whole
    comm: set[int] = field(init=False)
    select: dict[str, set[int]] = field(init=False)  # by pattern, the layers where it is recomputed
    _matched: dict[tuple[str, int], list[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self.full = config.recompute.among(self.chunks, self.stage)
        self.comm = config.comm.among(self.chunks, self.stage)
        self.select = {name: layers.among(self.chunks, self.stage) for name, layers in config.select.items()}

    def matched(self, pattern: str, layer: int) -> list[str]:
        key = pattern, layer
        if key not in self._matched:
            self._matched[key] = matching(pattern, self.names.get(layer, ()))
        return self._matched[key]

    def must_match(self) -> list[str]:
        """Raises SettingError for a pattern that matches nothing in all the layers that it is for. Returns lines about
        single ones."""
        told = []
        for pattern, key in self.config.patterns.items():
            wanted = sorted(n for n in self.names if n in self.select.get(pattern, ()) or self._swaps(pattern, n))
            missing = [n for n in wanted if not self.matched(pattern, n)]
            if wanted and len(missing) == len(wanted):
                names = near(pattern, [name for n in wanted for name in self.names[n]])
                hint = f"near it: {', '.join(names)}" if names else "the layers have no parts"
                raise self.config.document.error(
                    key, f"{pattern}: no operator of this model matches; {hint} (mindspeed-swap ops lists them)"
                )
            told += [f"layer {n} has no {in_megatron(pattern)}" for n in missing]
        return told

    def _swaps(self, pattern: str, layer: int) -> bool:
        return any(entry.name == pattern and layer in entry.layers for entry in self.config.ops)

    def recomputes(self, layer: int, name: str) -> bool:
        """Whether the setting recomputes this part of a layer."""
        return any(layer in layers and name in self.matched(p, layer) for p, layers in self.select.items())

    def entry(self, layer: int, names: set[str]) -> tuple[Entry, str] | None:
        """What moves something that is saved inside all of ``names``, and which of these it is for. The first match
        wins, and operators come before their layer."""
        for entry in self.config.ops:
            if layer in entry.layers:
                for name in self.matched(entry.name, layer):
                    if name in names:
                        return entry, name
        return next(((entry, WHOLE) for entry in self.config.layer_swap if layer in entry.layers), None)


