#!/usr/bin/env bash
# Sets up what is missing, as run.sh does, with what the tests need, and runs them. Arguments go to pytest: `./test.sh -k loader`.
set -euo pipefail

# shellcheck source=run.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/run.sh"
# shellcheck source=env.sh
source "$ROOT/env.sh" || exit
install test
avoid_spaces
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
