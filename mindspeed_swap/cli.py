"""The console script ``mindspeed-swap`` (also ``python -m mindspeed_swap``). Imports no torch to start."""
from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import gib_argument
from mindspeed_swap.version import __version__, installed

_DISTRIBUTIONS = ("torch", "megatron-core", "torch_npu", "transformer-engine", "numpy")
_ENVIRONMENT = (
    "MINDSPEED_SWAP_DEVICE",
    "MINDSPEED_SWAP_DEVICE_CAPACITY",
    "MINDSPEED_SWAP_SIM_LINK_GBPS",
    "MINDSPEED_SWAP_OOM_HOOK",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
)


def versions() -> str:
    """What a bug report needs, one ``name value`` line each. Imports none of what it names."""
    lines = {"mindspeed-swap": __version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    lines |= {name: installed(name) or "not installed" for name in _DISTRIBUTIONS}
    # NVIDIA's apex is built from source; the "apex" of PyPI is something else, so its version would say nothing.
    lines["apex (multi_tensor kernels)"] = "present" if find_spec("amp_C") else "not installed"
    lines |= {name: os.environ.get(name, "not set") for name in _ENVIRONMENT}
    lines["ready configs"] = _configs()
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _configs() -> str:
    """Where the ready files for --swap-policy-config and --swap-config are: in the package if it was installed by pip,
    at the root of a checkout otherwise."""
    package = Path(__file__).resolve().parent
    return str(next((path for path in (package / "configs", package.parent / "configs") if path.is_dir()), "not found"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mindspeed-swap", description="A memory hierarchy for Megatron training.")
    told = "versions and settings, for a bug report; where the ready configs are"
    parser.add_argument("--version", action="store_true", help=told)
    parser.set_defaults(run=None)
    # A command has a parser here with set_defaults(run=function of the parsed arguments -> exit code).
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    report = commands.add_parser("report", help="one HTML page and pictures from what --swap-report-dir wrote")
    report.add_argument("dir", metavar="DIR", help="the folder given to --swap-report-dir")
    report.add_argument("--out", metavar="FILE", help="the page (default: DIR/report.html); pictures go beside it")
    report.add_argument("--run", dest="run_id", metavar="ID", help="which run, if DIR holds files of several")
    report.set_defaults(run=_report)
    what_if = commands.add_parser("what-if", help="predicted step time against memory, from a recorded step")
    what_if.add_argument("path", metavar="DIR|TRACE", help="what --swap-report-dir named, or a step_trace.json")
    budgets = "peaks to plan for, such as 30GiB; one: says all that its plan does"
    what_if.add_argument("--budgets", nargs="+", default=[], metavar="SIZE", help=budgets)
    limit = "limit of host memory, as --swap-host-memory"
    what_if.add_argument("--host-memory", type=gib_argument, metavar="GB", help=limit)
    what_if.add_argument("--picture", metavar="FILE", help="draw it too (needs matplotlib: mindspeed-swap[report])")
    what_if.set_defaults(run=_what_if)
    ops = commands.add_parser("ops", help="the names that a file for --swap-config can use, by layer, with bytes")
    ops.add_argument("path", metavar="DIR|TRACE", help="what --swap-report-dir named, or a step_trace.json")
    ops.set_defaults(run=_ops)
    hooks = commands.add_parser("build-hooks", help="libsmart_swap.so for custom C++ operators (NPUSwapManager.h)")
    hooks.set_defaults(run=_build_hooks)
    test = commands.add_parser("selftest", help="what training relies on, tried on a device; PASS or the first failure")
    test.add_argument("--device", required=True, choices=("npu", "cuda", "sim"))
    test.set_defaults(run=_selftest)
    return parser


def _report(args: argparse.Namespace) -> int:
    from mindspeed_swap.report.command import make_report

    return make_report(args.dir, args.out, args.run_id)


def _what_if(args: argparse.Namespace) -> int:
    from mindspeed_swap.report.command import what_if

    return what_if(args.path, args.budgets, args.host_memory, args.picture)


def _ops(args: argparse.Namespace) -> int:
    from mindspeed_swap.report.list_operators import list_operators

    return list_operators(args.path)


def _build_hooks(args: argparse.Namespace) -> int:
    from mindspeed_swap.hooks import build_hooks, include_paths
    from mindspeed_swap.npu_versions import import_torch

    import_torch()
    library = build_hooks()
    print(f"built {library}\ncompile operators with  -I{include_paths()[0]}")
    print(f"link them with          -L{library.parent} -lsmart_swap")
    print(f"and train with          LD_LIBRARY_PATH={library.parent}:$LD_LIBRARY_PATH")
    return 0


def _selftest(args: argparse.Namespace) -> int:
    print(f"{versions()}\n")
    if args.device == "npu":
        # Where torch_npu cannot be loaded, torch cannot either if it is to load it; asked for below, it says why.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from mindspeed_swap.npu_versions import import_torch

    import_torch()
    from mindspeed_swap.selftest import selftest

    return selftest(args.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a wrong setting."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.version:
        print(versions())
        return 0
    run: Callable[[argparse.Namespace], int] | None = args.run
    if run is None:
        parser.print_help()
        return 2
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SettingError as error:
        print(f"mindspeed-swap: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":  # python -m mindspeed_swap.cli, where scripts are not on the path
    sys.exit(main())
