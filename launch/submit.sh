#!/usr/bin/env bash
# Hand a run to a Ray cluster: launch/submit.sh experiment=reterm scale=full [KEY=VALUE ...]
#
#   RAY_ADDRESS       where the cluster takes jobs (default http://127.0.0.1:8265; on Kubernetes: kubectl port-forward, see k8s/)
#   RAY_AUTH_...      the cluster's token, see ray_token in common.sh; RAY_AUTH_MODE=disabled for a cluster without one
#   TERMRSI_NO_WAIT   set to 1: return once the job is accepted, instead of following its log
#   RAY               the ray command (default: the one in .venv, else on PATH)
#
# The checkout travels as the job's working directory, without .venv, runs and .git: the packages must be on the cluster already.
# Give run_dir= a path that every node sees, or the results stay in a directory that Ray removes.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

[[ $# -gt 0 ]] || fail "nothing to run; give at least experiment=NAME, one of: $(cd conf/experiment && ls | sed 's/\.yaml$//' | paste -sd' ')"
address="${RAY_ADDRESS:-http://127.0.0.1:8265}"
ray="${RAY:-$VENV/bin/ray}"
[[ -x "$ray" ]] || ray="$(command -v ray)" || fail "there is no ray command; run launch/test.sh once to make .venv, or set RAY to its path"

cluster=(cluster=join)
for argument in "$@"; do
    [[ "$argument" == cluster=* ]] && cluster=()
    [[ "$argument" == run_dir=* ]] && run_dir_given=1
done
[[ -n "${run_dir_given:-}" ]] || say "no run_dir= given: results stay in the job's working directory, which Ray removes in time"

environment='{"excludes": ["/.venv/", "/runs/", "/.git/", "/outputs/", "/multirun/", "/wandb/", "/dist/", "/build/", "__pycache__/", ".*_cache/", "/.hypothesis/"]}'
options=(--address "$address" --working-dir . --runtime-env-json "$environment")
[[ "${TERMRSI_NO_WAIT:-}" == 1 ]] && options+=(--no-wait)

ray_token
say "submitting to $address: termrsi ${cluster[*]} $*"
exec "$ray" job submit "${options[@]}" -- python -m termrsi "${cluster[@]}" "$@"
