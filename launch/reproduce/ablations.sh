#!/usr/bin/env bash
# The arms of Terminal-RSI's Table 5, one table: launch/reproduce/ablations.sh [KEY=VALUE ...]
# SEEDS="0 1 2", ARMS="credit=skip reward=offset,calibration=global" and OUT choose what is run, and where. An arm takes from its seed's
# base run whatever stands before the first difference. Stopped and started again it goes on: what is finished is not run twice.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
setup
cd "$ROOT"

SEEDS="${SEEDS:-0 1 2}"
OUT="${OUT:-runs/ablations}"
ARMS="${ARMS:-credit=skip credit=token reward=fdr reward=saturation reward=offset calibration=global critic_init=reset warmup=off \
critic_init=reset,warmup=off schedule=continue_rpr schedule=rollback}"

directories=()
run() { # directory, then overrides; a run that was refused or failed ends the script, with its own message above
    local directory="$1"
    shift
    directories+=("$directory")
    say "$directory"
    termrsi experiment=terminal_rsi "$@" run_dir="$directory" || fail "$directory did not end: the same command goes on from there"
}

for seed in $SEEDS; do
    base="$OUT/base/seed-$seed"
    run "$base" seed="$seed" "$@"
    for arm in $ARMS; do
        IFS=, read -ra words <<<"$arm"
        name="${arm//=/-}" # Hydra reads a sign of equality in a path as one of its own
        run "$OUT/${name//,/+}/seed-$seed" seed="$seed" reuse="$base" "$@" "${words[@]}" # what an arm says comes last
    done
done
termrsi report "${directories[@]}" | tee "$OUT/table.md"
say "the table: $OUT/table.md"
