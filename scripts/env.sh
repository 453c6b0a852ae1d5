# Sourced by the other scripts. Makes .venv at the repository's root with everything in requirement.txt and this
# checkout, or takes the one that is there. Afterwards: $ROOT, $PYTHON (of the environment), $GPU_NAME (empty: none).
# Needs bash, network access to a package index, and Python 3.12 or 3.13 (or network access for uv, which fetches one).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
GPU_NAME="$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)" || GPU_NAME=""
if [ -n "$GPU_NAME" ]; then echo "GPU found: $GPU_NAME"; else echo "no GPU found: using the simulated device"; fi

# Runs, is 3.12 or 3.13, can make environments, and has the headers that our C++ parts are compiled against. (A shim
# of pyenv is on PATH even where it has no Python to run.)
_usable() {
    "$1" -c 'import ensurepip, os, sys, sysconfig, venv
sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        >/dev/null 2>&1
}

_find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12.*/bin/python "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.13.*/bin/python; do
        if _usable "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    local uv
    if uv="$(_find_uv)" && "$uv" python install -q 3.12 >&2; then
        candidate="$("$uv" python find 3.12)" && _usable "$candidate" && echo "$candidate" && return 0
    fi
    echo "No usable Python 3.12 or 3.13 found (on PATH, under pyenv, through uv). Install one with its venv module and
headers, for example: apt-get install python3.12-dev python3.12-venv, or pyenv install 3.12, or uv python install 3.12" >&2
    return 1
}

# uv fetches whole Pythons. Where it is not installed, any Python with venv and a package index will do to get it.
_find_uv() {
    command -v uv && return 0
    local folder
    folder="$(mktemp -d)" && python3 -m venv "$folder" >/dev/null 2>&1 || return 1
    "$folder/bin/pip" --disable-pip-version-check -q install uv >/dev/null 2>&1 && echo "$folder/bin/uv"
}

_pip() {
    "$PYTHON" -m pip --disable-pip-version-check --no-input "$@" >>"$ROOT/.venv/install.log" 2>&1
}

# What the environment was made from. Its folder is part of it: environments cannot be moved.
_stamp() {
    { echo "$ROOT"; "$PYTHON" -V; cat "$ROOT/requirement.txt" "$ROOT/setup.py"; } 2>/dev/null | sha256sum | cut -c 1-64
}

_prepare_environment() {
    local stamp="$ROOT/.venv/installed" python seconds=$SECONDS
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(_stamp)" ] && "$PYTHON" -c "" 2>/dev/null && return 0
    # Without the stamp, which is written last, an install was interrupted: pip would take half a package for a whole.
    if [ ! -f "$stamp" ] || ! "$PYTHON" -c "" 2>/dev/null; then
        python="$(_find_python)" || return 1
        echo "Making .venv with $("$python" -V) ..."
        "$python" -m venv --clear "$ROOT/.venv" || return 1
    fi
    rm -f "$stamp"
    echo "Installing requirement.txt (5 GB on disk; a minute or a few; log: .venv/install.log) ..."
    # --no-compile: Python compiles what is imported, which is a small part of 5 GB.
    if ! { _pip install --no-compile -r "$ROOT/requirement.txt" && _pip install --no-deps --no-build-isolation -e "$ROOT"; }; then
        echo "Installing failed; the end of .venv/install.log:" >&2
        tail -n 15 "$ROOT/.venv/install.log" >&2
        return 1
    fi
    _stamp >"$stamp"
    echo "Installed in $((SECONDS - seconds)) s."
}

# One at a time: scripts started together in a fresh checkout would install over each other.
{
    if command -v flock >/dev/null; then flock 9; fi
    _prepare_environment 9>&-
} 9>"$ROOT/.venv.lock" || exit 1
