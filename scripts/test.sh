#!/usr/bin/env bash
# The test suite: scripts/test.sh [--full] [arguments of pytest]. --full runs the whole matrix of layouts.
# tests/ascend runs the real torch_npu without an NPU, in .venv-ascend, which it makes (1 GB); where that cannot be made
# it is skipped, and the end of the output says why.
set -u -o pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT" || exit 1
[ -z "$GPU_NAME" ] || echo "tests/gpu runs on it, all other tests on the simulated device"
cores="$(env -u OMP_NUM_THREADS nproc)" # nproc believes that variable
# Several ranks of a test share the cores: OpenMP threads of one would spin on the cores of the others. (torchrun
# does the same.)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
parallel=()
case "${*#--full}" in
    # Everything: files side by side, each with its share of the cores, and the branch coverage of the core by its own
    # tests, which must be what pyproject.toml says. A selection runs in order, in one process, without.
    "" | " ") parallel=(-n "$((cores < 4 ? cores : 4))" --dist loadgroup --cov=mindspeed_swap/core --cov-report=term) ;;
esac
"$PYTHON" -m pytest "${parallel[@]}" "$@"
code=$?
if [ "$code" = 5 ]; then # pytest's code for an empty selection
    echo "No test was selected: nothing failed, nothing was shown."
    exit 0
fi
exit "$code"
