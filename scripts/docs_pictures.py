"""Pictures of the documentation that are drawn from a list of boxes, as SVG."""
from __future__ import annotations

from collections.abc import Sequence

_INK, _FAINT, _LINE = "#1f2933", "#52606d", "#9aa5b1"
_Box = tuple[int, int, int, int, str, str, str]  # x, y, width, height, color, title, text


def _svg(width: int, height: int, boxes: Sequence[_Box], rest: Sequence[str] = ()) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{_INK}">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{_FAINT}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for x, y, w, h, color, title, text in boxes:
        lines.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{color}" stroke="{_LINE}"/>')
        lines.append(f'<text x="{x + 8}" y="{y + 19}" font-weight="bold">{title}</text>')
        lines += [
            f'<text x="{x + 8}" y="{y + 37 + 16 * i}" font-size="11" fill="{_FAINT}">{line}</text>'
            for i, line in enumerate(filter(None, text.split("\n")))
        ]
    return "\n".join([*lines, *rest, "</svg>"]) + "\n"


def _arrow(x1: int, y1: int, x2: int, y2: int, text: str = "") -> str:
    place = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    line = f'<line {place} stroke="{_FAINT}" stroke-width="1.4" marker-end="url(#tip)"/>'
    if not text:
        return line
    return f'{line}<text x="{(x1 + x2) // 2 + 6}" y="{(y1 + y2) // 2 + 4}" font-size="11" fill="{_FAINT}">{text}</text>'


def architecture_picture() -> str:
    patch, front, core, device = "#fde8d7", "#dbeafe", "#dcfce7", "#f1f5f9"
    boxes: list[_Box] = [
        (20, 20, 860, 64, patch, "patches",
         "arguments, training, schedules, transformer_layer, modules, linear, recompute, distributed_optimizer\n"
         "the only code that knows Megatron; each file a table of (target, wrapper)"),
        (20, 120, 200, 80, front, "smart_swap", "WarmUp, SearchPolicy, Stable\nkeep or swap, per tensor"),
        (240, 120, 200, 80, front, "adaptive_memory", "the same search with\nkeep, swap or recompute"),
        (460, 120, 200, 80, front, "fine_grained", "the user's own list\nfrom a YAML file"),
        (680, 120, 200, 80, front, "virtual_optimizer", "Adam's moments in host\nmemory: mapped, streamed"),
        (20, 240, 270, 130, core, "core: decide (no torch)",
         "trace.py: what one step did\nsimulate.py: trace x plan -&gt; memory, time\n"
         "solve.py: trace x budget -&gt; plan\nplan.py: what to do at which position"),
        (310, 240, 350, 130, core, "core: do",
         "swap_manager.py: pack, unpack, release, prefetch\nsaved_tensor.py: one storage and its state\n"
         "oom_guard.py: on pressure evict, retry\nhost_pool.py: pinned slabs, one budget\n"
         "recompute.py, again.py: a call runs again"),
        (680, 240, 200, 130, core, "report", "summary.json, trace.json\none HTML page, PNGs\nwhat-if, ops, selftest"),
        (20, 410, 860, 62, device, "core/accelerator: the contract with a device",
         "cuda.py, npu.py, sim.py (real bytes, real out of memory, copy threads; no GPU needed)"),
    ]  # fmt: skip
    rest = [_arrow(x, 84, x, 118) for x in (120, 340, 560, 780)]
    rest += [_arrow(x, 200, x, 238) for x in (120, 400, 560)]
    rest += [_arrow(720, 200, 640, 238), _arrow(290, 305, 308, 305), _arrow(485, 370, 485, 408)]
    return _svg(900, 490, boxes, rest)


def life_picture() -> str:
    compute, out, back, gone = "#dbeafe", "#ede9fe", "#cffafe", "#f1f5f9"
    boxes: list[_Box] = [
        (110, 20, 160, 46, compute, "forward: layer n", "writes and reads the tensor"),
        (280, 20, 250, 46, compute, "other layers, other microbatches", "its memory is theirs"),
        (540, 20, 140, 46, compute, "backward: n + 1", ""),
        (690, 20, 170, 46, compute, "backward: layer n", "reads the tensor"),
        (200, 110, 130, 46, out, "copy to host", "storage bytes to a slab"),
        (550, 200, 130, 46, back, "copy to device", "slab to a new buffer"),
        (20, 290, 240, 60, gone, "DEVICE, LEAVING", "the device copy is the truth"),
        (340, 290, 200, 60, gone, "HOST", "device memory given up"),
        (550, 290, 130, 60, gone, "RETURNING", "buffer is there"),
        (690, 290, 170, 60, gone, "DEVICE", "until its last handle dies"),
    ]
    rest = [
        f'<text x="10" y="{y}" font-weight="bold">{name}</text>'
        for y, name in ((48, "compute"), (138, "D2H stream"), (228, "H2D stream"))
    ]
    rest += [
        _arrow(220, 66, 220, 108, "event: written"), _arrow(330, 140, 360, 68, "event: may be given up"),
        _arrow(560, 66, 580, 198, "event: the block is free"), _arrow(680, 210, 710, 68, "event: is back"),
    ]  # fmt: skip
    return _svg(880, 370, boxes, rest)


def limits_picture(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """``bars``: name, value, what is said beside it."""
    left, longest, most = 130, 420, max(value for _, value, _ in bars)
    rest = [f'<text x="20" y="28" font-weight="bold">{title}</text>']
    for number, (name, value, text) in enumerate(bars):
        y, width = 48 + 44 * number, round(longest * value / most)
        rest.append(f'<rect x="{left}" y="{y}" width="{width}" height="28" fill="#2563eb"/>')
        rest.append(f'<text x="20" y="{y + 19}">{name}</text>')
        place = f'x="{left + width + 8}" y="{y + 19}"'
        rest.append(f'<text {place} font-size="11" fill="{_FAINT}">{value:.2f}: {text}</text>')
    return _svg(780, 60 + 44 * len(bars), [], rest)
