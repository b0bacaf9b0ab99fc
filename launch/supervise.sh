#!/usr/bin/env bash
# Keeps a run going: starts a command, and again from the newest checkpoint when it fails.
#   bash launch/supervise.sh [--restarts N] [--wait SECONDS] -- deepspeed --num_gpus 8 train.py --run-dir RUN_DIR ...
set -uo pipefail

usage="usage: bash launch/supervise.sh [--restarts N] [--wait SECONDS] -- COMMAND ... --run-dir RUN_DIR ...

Starts COMMAND, a launcher with train.py, and again whenever it fails: at most N times in a row (default: 3) without a new
checkpoint in between, SECONDS (default: 10) apart. Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal ask the run to save and end after its current
step, by making RUN_DIR/stop; a second Ctrl-C ends it at once. Exit status: 0 the run is done; 75 it was asked to end and goes
on with the same command; 2 wrong usage, or a mistake that another start would meet again; 1 given up."
fail() { printf 'supervise.sh: error: %s\n' "$1" >&2; exit 2; }
say() { printf 'supervise.sh: %s\n' "$1" >&2; }

restarts=3 pause=10
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --restarts | --wait)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || fail "$1 '${2:-}': a whole number is needed"
            [ "$1" = --restarts ] && restarts=$2 || pause=$2
            shift 2 ;;
        --) shift; break ;;
        *) fail "unknown argument '$1'; the command goes after --" ;;
    esac
done
run_dir="" resume="" previous=""
for word in "$@"; do
    [ "$previous" = --run-dir ] && run_dir=$word
    [[ "$word" == --run-dir=* ]] && run_dir=${word#--run-dir=}
    [ "$previous" = --resume ] && resume=$word
    [[ "$word" == --resume=* ]] && resume=${word#--resume=}
    previous=$word
done
[ $# -gt 0 ] || fail "no command given; $(head -n 1 <<<"$usage")"
[ -n "$run_dir" ] || fail "the command has no --run-dir; name one, or every start would begin a run of its own"
case "$resume" in
    never | "$run_dir"/*) fail "--resume $resume: every start would begin there again; leave it out, or give auto or a checkpoint of another run" ;;
esac

newest() { cat "$run_dir/checkpoints/latest" 2>/dev/null || echo none; }

child="" asked="" signalled="" repeating=()
ask() {
    signalled=yes
    if [ "$1" = INT ] && [ "$asked" = INT ]; then
        say "ended at once"
        kill -KILL -- "-$child" 2>/dev/null
        exit 130
    fi
    asked=$1
    say "SIG$1: the run saves and ends after its current step"
    [ -z "$child" ] || tell
}
tell() {
    # again and again: train.py does not look at a file that is older than itself, and it may still be starting; even its session may not be
    # there yet. No command of its own makes the file: it could do so after this was ended
    (while kill -0 "$child" 2>/dev/null || kill -0 -- "-$child" 2>/dev/null; do mkdir -p "$run_dir" && : >"$run_dir/stop"; sleep 1; done) &
    repeating+=("$!")
}
trap 'ask INT' INT
trap 'ask TERM' TERM
trap 'ask USR1' USR1
trap 'ask HUP' HUP # the terminal is gone

failures=0 status=0
while true; do
    before=$(newest)
    # in a session of its own: the launcher would answer the terminal's Ctrl-C by killing the ranks
    child=""
    setsid "$@" &
    child=$! status=127
    [ -z "$asked" ] || tell # while it was being started
    while true; do # a signal ends `wait`, not the command
        signalled=""
        wait "$child"; code=$?
        [ "$code" -eq 127 ] || status=$code # 127: it was waited for already
        [ -n "$signalled" ] || break
    done
    kill -KILL -- "-$child" 2>/dev/null # what a launcher that was killed leaves behind
    [ ${#repeating[@]} -eq 0 ] || { kill "${repeating[@]}" 2>/dev/null; wait "${repeating[@]}" 2>/dev/null; rm -f "$run_dir/stop"; }
    if [ "$status" -eq 0 ] && [ ! -e "$run_dir/done" ]; then
        status=1 # DeepSpeed's launcher gives 0, too, when a signal has ended it
        say "the command ended without $run_dir/done, which train.py makes when it is done"
    fi
    case $status in
        0) exit 0 ;;
        75) exit 75 ;;
        2) say "exit status 2: another start would end the same way"; exit 2 ;;
    esac
    if [ -n "$asked" ]; then
        say "the run ended with status $status before it could save; the newest checkpoint is $(newest)"
        exit 75
    fi
    after=$(newest)
    [ "$after" = "$before" ] && failures=$((failures + 1)) || failures=1
    if [ "$failures" -gt "$restarts" ]; then
        say "given up: $failures failures in a row without a new checkpoint, the last with status $status; the newest checkpoint is $after"
        exit 1
    fi
    say "the run ended with status $status; start $failures of $restarts from checkpoint '$after' in $pause s"
    sleep "$pause" & wait $!
    [ -n "$asked" ] && exit 75
done
