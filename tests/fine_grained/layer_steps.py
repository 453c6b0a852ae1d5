"""Steps as they would be recorded of Llama-like layers with every module's borders. Pure; deterministic."""
from __future__ import annotations

from dataclasses import dataclass, field

from traces import MIB, _Recorder

from mindspeed_swap.core.recompute import WHOLE_LAYER
from mindspeed_swap.core.trace import (
    BACKWARD,
    ENTER,
    EXIT,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    Key,
    ModuleKey,
    ModuleRecord,
    Position,
    StepTrace,
    plain_name,
)

MODULE_BORDER = -2

# A module: name and what happens in it; a word: a tensor is saved. In the order in which they run.
LAYER = [
    ("input_layernorm", ["x0"]),
    (
        "self_attention",
        [("linear_qkv", ["h1"]), ("core_attention", ["q", "k", "v", "o"]), ("linear_proj", ["o"])],
    ),
    ("pre_mlp_layernorm", ["x1"]),
    ("mlp", [("linear_fc1", ["h2"]), "gate", ("linear_fc2", ["act"])]),
]
# Who makes what is saved. What is not here nobody that could be named.
MAKERS = {
    "h1": "input_layernorm", "q": "self_attention.linear_qkv", "k": "self_attention.linear_qkv",
    "v": "self_attention.linear_qkv", "o": "self_attention.core_attention", "h2": "pre_mlp_layernorm",
    "gate": "mlp.linear_fc1", "act": "mlp.", "x1": ".",
}  # fmt: skip
SIZES = {"gate": 4, "act": 2}  # MiB; others: 1
OPERATORS = ("input_layernorm", "linear_qkv", "core_attention", "linear_proj", "pre_mlp_layernorm", "linear_fc1",
             "linear_fc2")  # fmt: skip


@dataclass
class Step:
    """Layers of one rank: ``chunks`` of numbers from 0. Microbatches run one after the other."""

    chunks: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    microbatches: int = 1
    gbps: float = 50.0
    ms: float = 0.5  # every interval
    layer: list = field(default_factory=lambda: LAYER)
    keys: dict[tuple[int, int, str], Key] = field(default_factory=dict)  # microbatch, layer from 0, tensor

    def trace(self) -> StepTrace:
        rec = _Recorder(100 * MIB)
        for m in range(self.microbatches):
            for c, layers in enumerate(self.chunks):
                rec.point(Position(FORWARD, m, c, OUTSIDE, ENTER), self.ms, 0)
                for layer in layers:
                    _Forward(self, rec, m, c, layer)
                rec.point(Position(FORWARD, m, c, OUTSIDE, EXIT), self.ms, 0)
            for c, layers in reversed(list(enumerate(self.chunks))):
                for layer in reversed(layers):
                    self._backward(rec, m, c, layer)
        rec.point(Position(OPTIMIZER, 0, 0, OUTSIDE, ENTER), self.ms, 0)
        rec.point(Position(OPTIMIZER, 0, 0, OUTSIDE, EXIT), self.ms, MIB)
        return StepTrace(
            model="llama", capacity_bytes=1 << 40, static_bytes=rec.static, d2h_bytes_per_ms=self.gbps * 1e6,
            h2d_bytes_per_ms=self.gbps * 1e6, step_ms=rec.now, has_optimizer_state=True, points=rec.points,
            saved=rec.saved, modules=sorted(rec.modules, key=lambda module: module.end),
        )  # fmt: skip

    def _backward(self, rec: _Recorder, m: int, c: int, layer: int) -> None:
        saves = [p.position for p in rec.points
                 if p.position[:4] == (FORWARD, m, c, layer + 1) and p.position.ordinal >= 0]
        for position in reversed(saves):
            own = rec.by_save[position]
            record = rec.live[own]
            index = rec.point(Position(BACKWARD, *position[1:]), self.ms, 0)
            if record.first_read is None:
                record.first_read = index
            if record.key == Key(*position[1:]):
                rec.drop(own)


class _Forward:
    def __init__(self, step: Step, rec: _Recorder, m: int, c: int, layer: int) -> None:
        self.step, self.rec, self.at = step, rec, (m, c, layer + 1)
        self.borders = self.ordinals = 0
        rec.by_save = getattr(rec, "by_save", {})
        self.names: dict[Key, str] = {}
        rec.point(Position(FORWARD, *self.at, ENTER), step.ms, 0)
        self.modules: list[ModuleRecord] = []
        self.module("", step.layer)
        end = rec.point(Position(FORWARD, *self.at, EXIT), step.ms, 0)
        step.keys.update({(m, layer, name): key for key, name in self.names.items()})
        for record in rec.saved:
            if self.names.get(record.key) == "x0":
                record.sole = end + 1  # the caller's frame holds it
        # What a module makes is freed with it, whoever saves it.
        for record in self.modules:
            for key, name in self.names.items():
                maker = MAKERS.get(name, "")
                if key not in record.frees and key not in record.keeps and maker and f"{maker}.".startswith(
                    f"{record.key.name}."
                ):
                    record.frees.append(key)
        rec.modules += self.modules

    def module(self, name: str, body: list) -> list[Key]:
        """Runs it. Returns what is saved inside."""
        begin = self.border()
        inside: list[Key] = []
        for item in body:
            if isinstance(item, str):
                inside.append(self.save(item))
            else:
                inside += self.module(f"{name}.{item[0]}" if name else item[0], item[1])
        end = self.border()
        own = list(dict.fromkeys(inside))
        keeps = [key for key in own if self.from_outside(name, self.names[key])]
        frees = [key for key in own if key not in keeps]
        spent = (end - begin) * self.step.ms
        self.modules.append(ModuleRecord(ModuleKey(*self.at, name or "layer"), spent, begin, end, frees, keeps))
        return own

    def from_outside(self, name: str, tensor: str) -> bool:
        if not name:
            return tensor == "x0"
        maker = MAKERS.get(tensor, "")
        return not f"{maker}.".startswith(f"{name}.") if maker or tensor == "x0" else False

    def border(self) -> int:
        self.borders += 1
        return self.rec.point(Position(FORWARD, *self.at, MODULE_BORDER - self.borders), self.step.ms, 0)

    def save(self, tensor: str) -> Key:
        key = Key(*self.at, self.ordinals)
        self.ordinals += 1
        for own, name in self.names.items():
            if name == tensor:  # once more
                index = self.rec.point(Position(FORWARD, *key), self.step.ms, 0)
                self.rec.live[own].last_use = index
                self.rec.by_save[Position(FORWARD, *key)] = own
                return own
        self.rec.save(key, SIZES.get(tensor, 1) * MIB, self.step.ms, 0)
        self.names[key] = tensor
        self.rec.by_save[Position(FORWARD, *key)] = key
        return key


def layer_names(trace: StepTrace) -> dict[int, list[str]]:
    """Layer, from 0 -> names of the modules in it, in the order of their calls."""
    found: dict[int, dict[str, int]] = {}
    for module in trace.modules:
        names = found.setdefault(module.key.layer - 1, {})
        if (name := plain_name(module.key)) != WHOLE_LAYER:
            names[name] = min(names.get(name, module.begin), module.begin)
    return {layer: sorted(names, key=lambda n: (names[n], n)) for layer, names in sorted(found.items())}
