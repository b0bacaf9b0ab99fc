#!/usr/bin/env bash
# The first hour on GPUs: what is most worth knowing first (bench/README.md).
#   bash bench/first_hour.sh one|eight [--dry] [--only WORD,…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" -m bench.first_hour "$@"
