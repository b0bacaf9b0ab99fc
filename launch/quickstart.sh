#!/usr/bin/env bash
# From a fresh machine to a run that visibly learns: sets up, prepares the embedded data, trains.
#   bash launch/quickstart.sh [-- OPTIONS OF train.py]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
    -h | --help)
        echo "usage: bash launch/quickstart.sh [-- OPTIONS OF train.py]"
        echo "Sets up .venv (or the active environment), prepares the embedded data and trains on it: one process per GPU found,"
        echo "else two on CPU, where it takes about five minutes. A second call does not install again."
        exit 0 ;;
    "" | --) [ $# -gt 0 ] && shift ;;
    *) fail "unknown argument '$1'; options of train.py go after --" ;;
esac

set_up requirements.txt
cd "$root"
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
"$PYTHON" -m data.inspect demo --count 0
run=(); case " $* " in *" --run-dir"*) ;; *) run=(--run-dir "runs/quickstart-$(date +%Y%m%d-%H%M%S)") ;; esac
if [ "$gpus" -eq 0 ]; then
    echo "no GPU found: two processes on CPU"
    export DS_ACCELERATOR=cpu
    gpus=2
fi
# as a module: the script that pip installs cannot be run from a folder whose path holds a space
"$PYTHON" -m deepspeed.launcher.runner --quiet --num_gpus "$gpus" train.py ${run[@]+"${run[@]}"} "$@"

folder="${run[1]:-}"
if [ -n "$folder" ]; then
    echo
    echo "worth opening:"
    echo "  $folder/report.html     the run on one page, for a browser: curves, queries with pictures, timelines"
    echo "  $folder/metrics.jsonl   loss, gradient norms and throughput of every step, retrieval of every evaluation"
    echo "  $folder/config.json     everything that was decided: options, stage graph, versions"
    echo "  $folder/checkpoints/    python evaluate.py $folder gives the table again from the newest checkpoint"
fi
