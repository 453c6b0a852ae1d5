#!/usr/bin/env bash
# Runs tests with our C++ parts built under AddressSanitizer and UndefinedBehaviorSanitizer: scripts/sanitize.sh
# [arguments of pytest]; without any, the tests that drive the C++ hardest. Needs g++. Any report fails the test in
# which it comes up. Without leak detection: Python itself never frees much of what it has.
set -eu -o pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
# A report ends the process (-fno-sanitize-recover): a line on stderr would be lost in a test's output.
export CXX="g++ -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
export TORCH_EXTENSIONS_DIR="$ROOT/build/sanitized"
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
# Python is not built with them: they must be there first. (And libstdc++: else exceptions of C++ are not found.)
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so) $(g++ -print-file-name=libstdc++.so.6)"
[ $# -gt 0 ] || set -- tests/core/test_sim_device.py tests/core/test_sim_copies.py tests/core/test_races.py \
    tests/core/test_oom_guard.py tests/core/test_case_*.py tests/hooks tests/sim/test_places.py
exec env LD_PRELOAD="$preload" "$PYTHON" -m pytest -p no:cacheprovider "$@"
