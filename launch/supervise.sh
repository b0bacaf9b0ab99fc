#!/usr/bin/env bash
# Keeps a run going: launch/run/supervise.py with any Python from 3.10 on, whatever the working folder. --help says how.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || exit 2
exec "${PYTHON:-python3}" -I -c 'import sys; sys.path.insert(0, sys.argv.pop(1)); from launch.run.supervise import program; sys.exit(program())' "$root" "$@"
