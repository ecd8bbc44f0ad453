#!/usr/bin/env bash
# Builds the kernels and their C++ tests with address and undefined-behaviour sanitizers, and those
# tests that use threads with the thread sanitizer, and runs them; then random plans for
# BLOCKCOMPACT_FUZZ_SECONDS (60) from BLOCKCOMPACT_FUZZ_SEED (the time).
# Usage: scripts/sanitize.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
build_dir="${1:-build/sanitize}"
for kind in ON thread; do
  cmake -S . -B "$build_dir/$kind" -DBLOCKCOMPACT_SANITIZE="$kind" -DCMAKE_BUILD_TYPE=RelWithDebInfo
  cmake --build "$build_dir/$kind" --parallel 2
  ctest --test-dir "$build_dir/$kind" --output-on-failure
done
"$build_dir/ON/custom_calls/tests/fuzz" --seconds "${BLOCKCOMPACT_FUZZ_SECONDS:-60}" \
  --seed "${BLOCKCOMPACT_FUZZ_SEED:-$(date +%s)}"
