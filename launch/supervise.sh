#!/usr/bin/env bash
# Keeps a run going: starts a command, and again from the newest checkpoint when it fails.
#   bash launch/supervise.sh [--restarts N] [--wait SECONDS] [--elastic MIN[:MAX]] -- deepspeed --num_gpus 8 train.py --run-dir RUN_DIR ...
set -uo pipefail

usage="usage: bash launch/supervise.sh [--restarts N] [--wait SECONDS] [--elastic MIN[:MAX]] -- COMMAND ... --run-dir RUN_DIR ...

Starts COMMAND, a launcher with train.py, and again whenever it fails: at most N times in a row (default: 3) without a new
checkpoint in between, SECONDS (default: 10) apart. Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal ask the run to save and end after its current
step, by making RUN_DIR/stop; a second Ctrl-C ends it at once. Exit status: 0 the run is done; 75 it was asked to end and goes
on with the same command; 2 wrong usage, or a mistake that another start would meet again; 1 given up.

--elastic: COMMAND is DeepSpeed's launcher with --hostfile FILE or --num_gpus N. Before each start, the GPUs that answer on the hosts that
answer are counted (without nvidia-smi: the slots or N as written), and the run gets these, at most MAX; it waits while there are fewer than
MIN. A failure after a new checkpoint is started again at once. SIGUSR2: the run saves, ends and starts again with what is there then."
fail() { printf 'supervise.sh: error: %s\n' "$1" >&2; exit 2; }
say() { printf 'supervise.sh: %s\n' "$1" >&2; }

restarts=3 pause=10 least="" most=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) echo "$usage"; exit 0 ;;
        --restarts | --wait)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || fail "$1 '${2:-}': a whole number is needed"
            [ "$1" = --restarts ] && restarts=$2 || pause=$2
            shift 2 ;;
        --elastic)
            [[ "${2:-}" =~ ^([1-9][0-9]*)(:([1-9][0-9]*))?$ ]] || fail "$1 '${2:-}': MIN or MIN:MAX is needed, numbers of ranks such as 4:16"
            least=${BASH_REMATCH[1]} most=${BASH_REMATCH[3]}
            [ "${most:-$least}" -ge "$least" ] || fail "$1 $2: MIN is above MAX"
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
[ -n "$run_dir" ] || fail "the command has no --run-dir; name one (outside of @FILE), or every start would begin a run of its own"
case "$resume" in
    never | "$run_dir"/*) fail "--resume $resume: every start would begin there again; leave it out, or give auto or a checkpoint of another run" ;;
esac

words=() hostfile="" gpus="" where="" port=() # where: the place in `words` of what --elastic writes
elastic_words() {
    local word flag="" given="" excess='^--(include|exclude|num_nodes|node_rank|no_ssh|master_addr)$'
    for word in "$@"; do
        if [[ "$word" =~ ^--(hostfile|num_gpus|ssh_port|include|exclude|num_nodes|node_rank|master_addr)= ]]; then
            words+=("${word%%=*}" "${word#*=}") # two words
        else
            words+=("$word")
        fi
    done
    for word in "${!words[@]}"; do
        flag=${words[word]} given=${words[word + 1]:-}
        [[ ! "$flag" =~ $excess ]] || fail "--elastic chooses the hosts; leave out $flag, and name them in --hostfile"
        case "$flag" in
            --hostfile | -H) hostfile=$given ;;
            --num_gpus) gpus=$given ;;
            --ssh_port) port=(-p "$given") ;;
            *.py) break ;;
            *) continue ;;
        esac
        [ "$flag" = --ssh_port ] || where=$((word + 1))
    done
    [ -n "$where" ] || fail "--elastic needs DeepSpeed's launcher with --hostfile FILE or --num_gpus N before the script"
    [ -z "$hostfile" ] || [ -z "$gpus" ] || fail "--elastic: give --hostfile or --num_gpus, not both; the file says how many slots a host has"
    [ -z "$gpus" ] || [[ "$gpus" =~ ^[1-9][0-9]*$ ]] || fail "--num_gpus '$gpus': a whole number is needed, the most that --elastic takes"
    if [ -n "$hostfile" ]; then
        [ -r "$hostfile" ] || fail "--hostfile $hostfile: cannot be read"
        # one host that is left may be another one than this
        words=("${words[@]:0:where-1}" --force_multi "${words[@]:where-1}") where=$((where + 1))
    fi
}
[ -z "$least" ] || elastic_words "$@"

newest() { cat "$run_dir/checkpoints/latest" 2>/dev/null || echo none; }

trained() { tail -n 1 "$run_dir/metrics.jsonl" 2>/dev/null | grep -o -m 1 '"step": [0-9]*' | grep -o '[0-9]*$' || echo 0; } # steps

# how many GPUs answer; a host without nvidia-smi has the slots that are written
counting='command -v nvidia-smi >/dev/null || { echo all; exit; }; timeout 10 nvidia-smi -L 2>/dev/null | grep -c "^GPU "'
[ "${DS_ACCELERATOR:-}" = cpu ] && counting='echo all'
there() { # lines of a file of hosts: those that answer, with the ranks that the run gets there
    local number=0 host slots rest
    if [ -z "$hostfile" ]; then
        echo "1 localhost $gpus $(sh -c "$counting")"
    else
        while read -r host slots rest || [ -n "$host" ]; do
            [[ "$slots" == slots=* && "$host" != \#* ]] || continue
            number=$((number + 1))
            echo "$number $host ${slots#slots=} $(timeout 20 ssh -n -o BatchMode=yes -o ConnectTimeout=5 "${port[@]}" "$host" "sh -c '$counting'" 2>/dev/null | tail -n 1)" &
        done <"$hostfile"
        wait
    fi | sort -n | awk -v most="$most" '
        $4 == "" { next }
        { n = $4 == "all" || $4 + 0 > $3 + 0 ? $3 : $4; if (most && sum + n > most) n = most - sum }
        n > 0 { print $2 " slots=" n; sum += n }'
}
choose() { # into `words` what is there, as soon as it is enough
    local ranks waiting=""
    while true; do
        chosen=$(there)
        ranks=$(awk -F = '{ sum += $2 } END { print sum + 0 }' <<<"$chosen")
        [ -z "$asked" ] || exit 75
        [ "$ranks" -lt "$least" ] || break
        [ -n "$waiting" ] || say "waits until $least ranks are there; now: $ranks${chosen:+ (${chosen//$'\n'/, })}"
        waiting=yes
        sleep "$((pause > 0 ? pause : 1))" & wait $!
    done
    say "starts; ranks: $ranks${hostfile:+ (${chosen//$'\n'/, })}"
    words[where]=$ranks
    if [ -n "$hostfile" ]; then
        mkdir -p "$run_dir" && printf '%s\n' "$chosen" >"$run_dir/hosts" || exit 1
        words[where]=$run_dir/hosts
    fi
}
follow() { # says when the run trains on after a failure. $1: time of this start, $2: of the end before, $3: steps then, $4: checkpoint
    local from=${4#step-} step
    [ "$from" = none ] && from=0 || from=$((10#$from))
    while sleep 1; do
        step=$(trained)
        [ "$step" -gt "$from" ] && [[ "$(stat -c %.6Y "$run_dir/metrics.jsonl" 2>/dev/null)" > "$1" ]] || continue
        say "trains on from step $from, $((${EPOCHREALTIME%[.,]*} - ${2%[.,]*})) s after it had ended; steps lost: $(($3 > from ? $3 - from : 0))"
        break
    done
}

child="" asked="" signalled="" repeating=()
ask() {
    signalled=yes
    if [ "$1" = INT ] && [ "$asked" = INT ]; then
        say "ended at once"
        kill -KILL -- "-$child" 2>/dev/null
        exit 130
    fi
    [ "$1" != USR2 ] || { [ -n "$child" ] && [ -z "$asked" ]; } || return # it ends already, or is about to start
    asked=$1
    say "SIG$1: the run saves and ends after its current step$([ "$1" != USR2 ] || echo ', and starts again')"
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
[ -z "$least" ] || trap 'ask USR2' USR2

failures=0 status=0 chosen="" ended="" following=""
while true; do
    if [ -n "$least" ]; then
        earlier=$chosen
        choose
        [ "$chosen" = "$earlier" ] || failures=0 # the hosts may have been the cause
        set -- "${words[@]}"
    fi
    before=$(newest)
    # in a session of its own: the launcher would answer the terminal's Ctrl-C by killing the ranks
    setsid "$@" &
    child=$! status=127
    [ -z "$ended" ] || { follow "${EPOCHREALTIME/,/.}" "$ended" "$steps" "$before" & following=$!; }
    [ -z "$asked" ] || tell # while it was being started
    while true; do # a signal ends `wait`, not the command
        signalled=""
        wait "$child"; code=$?
        [ "$code" -eq 127 ] || status=$code # 127: it was waited for already
        [ -n "$signalled" ] || break
    done
    ended=$EPOCHREALTIME steps=$(trained)
    [ -z "$following" ] || { kill "$following"; wait "$following"; following=""; } 2>/dev/null
    kill -KILL -- "-$child" 2>/dev/null # what a launcher that was killed leaves behind
    child="" again=""
    [ "$asked" = USR2 ] && asked="" again=yes
    [ ${#repeating[@]} -eq 0 ] || { kill "${repeating[@]}" 2>/dev/null; wait "${repeating[@]}" 2>/dev/null; rm -f "$run_dir/stop"; repeating=(); }
    if [ "$status" -eq 0 ] && [ ! -e "$run_dir/done" ]; then
        status=1 # DeepSpeed's launcher gives 0, too, when a signal has ended it
        say "the command ended without $run_dir/done, which train.py makes when it is done"
    fi
    case $status in
        0) exit 0 ;;
        75) [ -n "$again" ] && continue; exit 75 ;;
        126 | 127) say "exit status $status: '$1', or a program that it starts, is not there or may not be run; install it, or give its path"; exit 2 ;;
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
    [ -n "$least" ] && [ "$failures" -eq 1 ] && soon=0 || soon=$pause
    say "the run ended with status $status; start $failures of $restarts from checkpoint '$after' in $soon s"
    sleep "$soon" & wait $!
    [ -n "$asked" ] && exit 75
done
