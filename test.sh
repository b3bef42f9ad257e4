#!/usr/bin/env bash
# Sets up what is missing, as run.sh does, with what the tests need, and runs them, two at a time with one thread each. Arguments go to
# pytest: `./test.sh -k loader`, `./test.sh -n 0` for one at a time.
set -euo pipefail

# shellcheck source=run.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/run.sh"
# shellcheck source=env.sh
source "$ROOT/env.sh" || exit
install test
avoid_spaces
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m pytest -n 2 --dist worksteal "$@"
