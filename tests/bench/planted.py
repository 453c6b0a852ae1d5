"""Result files that no run wrote."""
import json

from results import VERSION

GIB = 2**30


def record(workload, point, step_ms, *, peak=10 * GIB, held=8 * GIB, group="ours", machine="m", **more):
    return {
        "workload": workload, "point": point, "group": group, "machine": machine, "when": "2026-01-01T00:00:00",
        "budget_bytes": None, "microbatches": 1, "command": f"train {point}", "wall_seconds": 1.0,
        "ok": True, "why": "",
        "steps_ms": [step_ms] * 10, "step_ms": step_ms, "spread_ms": [step_ms, step_ms], "forward_ms": 30.0,
        "backward_ms": 60.0, "peak_bytes": {"forward_backward": peak, "optimizer": GIB}, "peak_reserved_bytes": peak,
        "held_bytes": held, "static_bytes": 2 * GIB, "host": [{"resident_bytes": GIB, "torch_pinned_bytes": None}],
        "ranks": [{"peak_bytes": peak, "held_bytes": held}], "losses": [2.0, 1.0],
    } | more  # fmt: skip


def plain(workload, step_ms=100.0, **more):
    return record(workload, "plain", step_ms, group="plain", **more)


def failed(workload, point, group="ours"):
    named = {"workload": workload, "point": point, "group": group, "machine": "m", "when": "2026-01-01T00:00:00"}
    return named | {"ok": False, "why": "out of memory", "wall_seconds": 1.0, "command": "", "budget_bytes": None}


def swap(predicted_ms, predicted_peak=10 * GIB, phase="Stable", stable_steps=10):
    return {"phase": phase, "stable_steps": stable_steps, "predicted_ms": predicted_ms,
            "predicted_peak_bytes": predicted_peak, "swap_bytes": GIB, "recompute_ms": 0.0}  # fmt: skip


def write(folder, records, device="gpu", **more):
    machine = {"device": device, "id": "m", "card": "a card"}
    data = {"version": VERSION, "machine": machine, "versions": {"torch": "2"}, "command": "", "points": records}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(data | more))
