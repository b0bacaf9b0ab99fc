# Sourced by quickstart.sh and test.sh: an environment with what the project needs, made once.
# Sets PYTHON. Uses the active virtual or conda environment, else makes .venv beside this folder (below ~/.cache/wye where
# the folder's path holds a space).
# An install is remembered by a stamp that holds the requirements' checksum: nothing is installed twice.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() { printf '%s: error: %s\n' "$(basename "$0")" "$1" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo "$candidate"; return; }
    done
    return 1
}

set_up() { # set_up REQUIREMENTS_FILE
    local requirements="$root/$1" environment stamp wanted
    command -v g++ >/dev/null 2>&1 || fail "no g++ found; DeepSpeed compiles a small C++ op on the first run. Install it (Debian: apt-get install g++)"
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
        environment="${VIRTUAL_ENV:-$CONDA_PREFIX}"
    else
        environment="$root/.venv"
        case "$root" in *[[:space:]]*)
            # torch cannot link extensions when it lies below such a path, and DeepSpeed compiles one
            environment="$HOME/.cache/wye/venv-$(printf %s "$root" | cksum | cut -d ' ' -f 1)"
            mkdir -p "$(dirname "$environment")"
            echo "the path of this folder holds a space: the environment is in $environment" ;;
        esac
        if [ ! -x "$environment/bin/python" ]; then
            local base
            base="$(find_python)" || fail "no Python 3.10 to 3.13 with the venv module found; install one, or name it: PYTHON=/path/to/python $0"
            echo "making $environment with $("$base" --version)"
            "$base" -m venv "$environment" || fail "could not make $environment"
        fi
    fi
    PYTHON="$environment/bin/python"
    export PATH="$environment/bin:$PATH"
    stamp="$environment/.wye-$(basename "$1" .txt)"
    wanted="$(cat "$root"/requirements*.txt | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        local packages quiet=--quiet
        packages="$(grep -c '^[A-Za-z]' "$requirements")"
        echo "installing the $packages packages of $1, and what they need, into $environment (some minutes the first time)"
        [ -t 1 ] && quiet="" # in a terminal pip shows each package, with a bar and what is left
        "$PYTHON" -m pip install $quiet --disable-pip-version-check -r "$requirements" || fail "pip could not install $requirements"
        echo "$wanted" >"$stamp"
    fi
}
