#!/usr/bin/env bash
# PPO, GRPO and ReTerm-GRPO after rewriting, and SPR against FDR in the second phase, over seeds, in one table:
# launch/reproduce/comparisons.sh [KEY=VALUE ...]
# SEEDS="0 1 2" and OUT choose what is run, and where. Stopped and started again it goes on. The lengths are those of one epoch of the
# laptop's tasks; GRPO's and ReTerm's seventh step (64 rollouts) stands against PPO's warm-up (at most 72).
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
setup
cd "$ROOT"

SEEDS="${SEEDS:-0 1 2}"
OUT="${OUT:-runs/comparisons}"
lengths=(stages.{ppo,fdr,spr}.{steps=6,retention.every=3} stages.{grpo,reterm}.steps=7 stages.grpo.retention.every=4
  stages.reterm.retention.every=4 stages.reterm.optim.lr=3.0e-5 stages.reterm.optim.minibatches=2
  stages.eval_{sft,grpo,ppo,reterm,sft_2,fdr,spr}.k=4)

directories=()
for seed in $SEEDS; do
    directory="$OUT/seed-$seed"
    directories+=("$directory")
    say "$directory"
    termrsi experiment=comparisons seed="$seed" "${lengths[@]}" "$@" run_dir="$directory" ||
        fail "$directory did not end: the same command goes on from there"
done
termrsi report "${directories[@]}" | tee "$OUT/table.md"
say "the table: $OUT/table.md"
