#!/usr/bin/env bash
# Kills actors and drivers of small runs for as long as asked: launch/soak.sh [KILLS | HOURSh] [KEY=VALUE ...]
# One table at the end; exit code 1 if a prompt was lost or trained twice, or anything was left behind. 100 kills unless said.
#
#   SEED=N        which kills are drawn (0); a fault names its own
#   OUT=DIR       where the runs lie (runs/soak): those that went well may be removed
#   PARTS=real    a stage of GRPO on a real vLLM engine, instead of three stages on a scripted one
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

amount="kills=100"
if [[ $# -gt 0 && "$1" != *=* ]]; then
    case "$1" in
        *[!0-9.h]* | "" | h) fail "'$1' is neither a number of kills nor of hours; valid: launch/soak.sh 100, launch/soak.sh 8h" ;;
        *h) amount="hours=${1%h}" ;;
        *.*) fail "$1 kills; valid: a whole number, or hours as in 0.5h" ;;
        *) amount="kills=$1" ;;
    esac
    shift
fi
for word in "$@"; do
    [[ "$word" == *=* ]] || fail "'$word' is no KEY=VALUE of a run"
done
case "${PARTS:=scripted}" in scripted | real) ;; *) fail "PARTS=$PARTS; valid: scripted, real" ;; esac
setup
cd "$ROOT"
python -m tests.chaos "dir=${OUT:-runs/soak}" "seed=${SEED:-0}" "parts=$PARTS" "$amount" "$@"
