"""Ours: --smart-swap, --adaptive-memory-optimization and --virtual-optimizer, at every budget.

A budget is the peak that a step may have, given as --swap-memory-target; ``@cap`` points cap the whole process instead.
"""
from __future__ import annotations

from points import FULL, OURS, PLAIN, Context, Point

GROUP = OURS
FEATURES = {"swap": "--smart-swap", "adaptive": "--adaptive-memory-optimization"}
LEAVES = {"swap@moved25": 0.25, "adaptive@held40": 0.60}  # of the bytes held at the end of forward
OPTIMIZER = {"gpu": "3", "sim": "0.0005"}  # GB
CAPACITY = {"swap": 0.95}  # a share of the plain run's reserved peak: what the whole process may have


def points(context: Context) -> list[Point]:
    features = [feature for feature in FEATURES if feature in context.workload.features]
    found = [planned(f"{feature}@nothing", feature) for feature in features]
    if "optimizer" in context.workload.features:
        amounts = {"3": OPTIMIZER[context.device], "all": "all"}
        found += [Point(f"optimizer@{n}", GROUP, ("--virtual-optimizer", x)) for n, x in amounts.items()]
        both = ("--virtual-optimizer", "all", FEATURES["swap"])
        found.append(Point("optimizer@all@swap", GROUP, both, searches=True))
    plain, known = context.peak(PLAIN), context.known.get(PLAIN)
    if plain is None or known is None:
        return found
    budgets: dict[tuple[str, str], int] = {}
    for name, share in LEAVES.items():
        budgets[name.split("@")[0], name.split("@")[1]] = plain - int(share * known["held_bytes"])
    if (full := context.peak(FULL)) is not None:
        budgets["adaptive", "full"] = full
    # Where a pipeline is filled, and in place of full recompute.
    budgets["swap", "0.80"] = budgets["adaptive", "0.80"] = int(0.8 * plain)
    for fraction in context.workload.fractions:
        for feature in ("adaptive", "swap"):
            budgets[feature, f"{fraction:.2f}"] = int(fraction * plain)
    found += [planned(f"{f}@{name}", f, budget) for (f, name), budget in budgets.items() if f in features]
    for feature, share in CAPACITY.items():
        if feature in features:
            cap = str(int(share * known["peak_reserved_bytes"]))
            found.append(planned(f"{feature}@cap", feature, settings={"MINDSPEED_SWAP_DEVICE_CAPACITY": cap}))
    return found


def planned(name: str, feature: str, budget: int | None = None, settings: dict[str, str] | None = None) -> Point:
    target = () if budget is None else ("--swap-memory-target", f"{budget // 2**10 / 2**20:.9f}")
    return Point(name, GROUP, (FEATURES[feature], *target), settings or {}, budget_bytes=budget, searches=True)
