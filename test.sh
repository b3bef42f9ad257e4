#!/usr/bin/env bash
# Sets up what is missing, as run.sh does, with what the tests need, and runs them, as many at a time as there are cores (2 to 16) with one
# thread each. Arguments go to pytest: `./test.sh -k loader`, `./test.sh -m "not slow"`, `./test.sh -n 0` for one at a time.
set -euo pipefail

# shellcheck source=run.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/run.sh"
# shellcheck source=env.sh
source "$ROOT/env.sh" || exit
install test
avoid_spaces
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
processes=$("$PYTHON" -c 'import os; print(min(16, max(2, len(os.sched_getaffinity(0)))))')
exec "$PYTHON" -m pytest -n "$processes" --dist loadscope "$@"
