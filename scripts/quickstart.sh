#!/usr/bin/env bash
# The main job: out of memory becomes training. On a fresh machine: bash scripts/quickstart.sh
# Arguments go to quickstart.py (--help).
set -u -o pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
if [ -n "$GPU_NAME" ]; then
    echo "this job is for the simulated device so far: the GPU is not used"
fi
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
