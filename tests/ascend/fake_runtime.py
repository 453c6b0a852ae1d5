"""Builds the fake CANN runtime for the torch_npu of a Python environment: a folder of libraries for LD_LIBRARY_PATH.

Run as ``python fake_runtime.py OUT`` by that environment's Python; needs g++ and nm. Imports no torch.
"""
from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent / "fake_cann"
# What torch_npu links to and never calls here.
EMPTY = ("hccl", "ge_runner", "graph", "acl_tdt_channel")
# What torch_npu opens by name, for compile options and for operators.
OPENED = ("acl_op_compiler", "opapi")
CANN = re.compile(r"(acl|Msprof|rt)[A-Z]\w*|aclrt\w+|aclop\w+|aclmdl\w+")


def _symbols(library: Path, flag: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", flag, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()}


def build(out: Path) -> None:
    package = Path(sysconfig.get_paths()["purelib"]) / "torch_npu"
    out.mkdir(parents=True, exist_ok=True)
    compile_ = ["g++", "-std=c++17", "-O2", "-fPIC", "-w", "-I", package / "include/third_party/acl/inc"]
    objects = []
    jobs = []
    for name in ("runtime", "kernels"):
        objects.append(out / f"{name}.o")
        jobs.append(subprocess.Popen([*compile_, "-c", HERE / f"{name}.cpp", "-o", objects[-1]]))
    if any(job.wait() for job in jobs):
        raise SystemExit("the fake CANN runtime does not compile")
    libraries = [*package.glob("_C*.so"), *(package / "lib").glob("*.so")]
    wanted = {name for library in libraries for name in _symbols(library, "--undefined-only") if CANN.fullmatch(name)}
    have = {
        line.split()[-1]
        for made in objects
        for line in subprocess.run(["nm", "--defined-only", made], capture_output=True, text=True).stdout.splitlines()
    }
    # Everything else that torch_npu links to: there, and answers 0.
    stub = out / "rest.c"
    stub.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(wanted - have)))
    library = out / "libascendcl.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-x", "c", stub, "-x", "none", *objects,
         "-lpthread", "-o", library], check=True,
    )  # fmt: skip
    for name in EMPTY:
        made = out / f"lib{name}.so"
        subprocess.run(["g++", "-shared", f"-Wl,-soname,{made.name}", "-x", "c", "/dev/null", "-o", made], check=True)
    for name in OPENED:
        link = out / f"lib{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
