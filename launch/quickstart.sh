#!/usr/bin/env bash
# From a fresh checkout to a trained agent on this machine: launch/quickstart.sh [KEY=VALUE ...]
# Without arguments: experiment=terminal_rsi scale=laptop. Stop it whenever you like; started again, it goes on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
cd "$ROOT"

has() { # whether a key is among the other arguments
    local key="$1" argument
    shift
    for argument in "$@"; do [[ "$argument" == "$key="* ]] && return; done
    return 1
}

overrides=("$@")
has scale "$@" || overrides=(scale=laptop "${overrides[@]}")
has experiment "$@" || overrides=(experiment=terminal_rsi "${overrides[@]}")

say "termrsi ${overrides[*]}"
status=0
termrsi "${overrides[@]}" || status=$?
if [[ $status -ge 128 ]]; then exit "$status"; fi # stopped by a signal: termrsi has said so
if [[ $status -eq 2 ]]; then exit 2; fi # it cannot be run as asked: one line has said why
[[ $status -eq 0 ]] || fail "the run ended with exit code $status; its message stands above, and the same command goes on from what is finished"

run_dir="$(python - "${overrides[@]}" <<'PYTHON'
import sys

from termrsi.config.load import load

config = load(sys.argv[1:])
print(config.run_dir or f"runs/{config.experiment}-{config.scale}-{config.seed}")
PYTHON
)"
say "what each stage gained and cost: $run_dir/ledger.md   (again, as a table: .venv/bin/termrsi report $run_dir)"
