#!/usr/bin/env bash
# From a fresh machine to passing tests: the same set-up as quickstart.sh, then pytest in three processes:
# some tests wait for what they started.
#   bash launch/test.sh [OPTIONS OF pytest]       --numprocesses 0: in one
#   bash launch/test.sh --all                     also what takes long, or needs more than the project: Ray,
#                                                 network namespaces, a browser, a notebook's kernel, compilers
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up requirements-test.txt
cd "$root"
exec "$PYTHON" -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
