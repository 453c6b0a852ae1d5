#!/usr/bin/env bash
# Makes .venv-ascend at the repository's root, or takes the one that is there: torch_npu on a CPU build of torch, for
# tests/ascend, which run it without an NPU. The last line of output is its Python. Exit code 3, and one line why, where
# it cannot be had: no Python that torch_npu has a wheel for, or no package index.
set -u
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv-ascend"
VERSION=2.13.0 # of torch and torch_npu; torch_npu 2.14.0 cannot be loaded beside a torch that knows CUDA
OTHERS="numpy pyyaml pytest ninja"
STAMP="$ROOT $VERSION $OTHERS"

cannot() {
    echo "The Ascend lane is left out: $*" >&2
    exit 3
}

_pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install -q --no-compile "$@" >>"$VENV/install.log" 2>&1; }

# Runs, makes environments, has the headers that our C++ parts are compiled against.
_usable() {
    "$1" -c 'import ensurepip, os, sys, sysconfig, venv
sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11), (3, 12), (3, 13)) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        >/dev/null 2>&1
}

_install() {
    rm -rf "$VENV"
    "$1" -m venv "$VENV" || return 1
    # A CPU build is a tenth of the size; not every index has one, and then the usual build does as well.
    { _pip "torch==$VERSION+cpu" "torch_npu==$VERSION" $OTHERS || _pip "torch==$VERSION" "torch_npu==$VERSION" $OTHERS; } || return 1
    echo "$STAMP" >"$VENV/installed"
}

_make() {
    [ "$(cat "$VENV/installed" 2>/dev/null)" = "$STAMP" ] && "$VENV/bin/python" -c "" 2>/dev/null && return 0
    command -v g++ >/dev/null || cannot "it needs g++"
    local candidate seen="" reason="no Python 3.10 to 3.13 with venv and headers was found"
    for candidate in python3.11 python3.12 python3.10 python3.13 python3 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.{11,12,10,13}.*/bin/python "$ROOT/.venv/bin/python"; do
        _usable "$candidate" || continue
        # One try per version of Python: the same index says the same.
        local minor="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        case " $seen " in *" $minor "*) continue ;; esac
        seen="$seen $minor"
        echo "Making .venv-ascend with Python $minor ..." >&2
        _install "$candidate" && return 0
        reason="pip could not install torch and torch_npu $VERSION for Python$seen: $(grep -a '^ERROR' "$VENV/install.log" | tail -n 1)"
    done
    cannot "$reason"
}

# One at a time, as in env.sh.
{
    if command -v flock >/dev/null; then flock 9; fi
    _make 9>&-
} 9>"$ROOT/.venv.lock"
echo "$VENV/bin/python"
