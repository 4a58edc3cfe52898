#!/usr/bin/env bash
# Hand a run to a Ray cluster: launch/submit.sh [OPTION ...] experiment=reterm scale=full [KEY=VALUE ...]
#
#   --no-wait     return once the job is accepted, instead of following its log
#   --env NAME    hand this variable on to the job, with its value here; may be given again. Ray shows a job's variables to whoever
#                 reaches the dashboard: keys that must not be seen there belong to the cluster (on Kubernetes: a secret, see k8s/)
#   --id ID       the job's name, instead of one made of experiment and time
#
#   RAY_ADDRESS   where the cluster takes jobs (default http://127.0.0.1:8265; on Kubernetes: kubectl port-forward, see k8s/)
#   RAY_AUTH_...  the cluster's token, see ray_token in common.sh; RAY_AUTH_MODE=disabled for a cluster without one
#   RAY           the ray command (default: the one in .venv, else on PATH)
#
# Exit code: the run's own (0 done, 2 it cannot be run as asked, 1 a fault), 143 if the job was stopped, 130 if you left its log.
# The checkout travels as the job's working directory, without .venv, runs and .git: the packages must be on the cluster already.
# Give run_dir= a path that every node sees, or the results stay in a directory that Ray removes. A job that was stopped or lost goes
# on from there when it is submitted again with the same arguments.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

STOP_S=120 # that a stopped run has to end its engine and its sandboxes; Ray's own is 3

need() { [[ $# -ge 2 && "$2" != --* ]] || fail "$1 wants a value"; }

wait=1 id="" names=()
while [[ "${1:-}" == -* ]]; do
    case "$1" in
        --no-wait) wait="" ;;
        --env)
            need "$@"
            [[ "$2" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env wants the name of a variable, not its value"
            [[ -n "${!2+set}" ]] || fail "--env $2: it is not set here"
            names+=("$2")
            shift
            ;;
        --id)
            need "$@"
            [[ "$2" =~ ^[A-Za-z0-9._-]+$ ]] || fail "--id '$2': letters, digits, '.', '_' and '-' make a name"
            id="$2"
            shift
            ;;
        *) fail "unknown option $1; valid: --no-wait, --env NAME, --id ID" ;;
    esac
    shift
done
[[ $# -gt 0 ]] || fail "nothing to run; give at least experiment=NAME, one of: $(cd conf/experiment && ls | sed 's/\.yaml$//' | paste -sd' ')"

cluster=(cluster=join) run_dir="" experiment=run
for argument in "$@"; do
    [[ "$argument" == ?*=* ]] || fail "'$argument' is no KEY=VALUE; options stand before the first of these"
    case "$argument" in
        cluster=*) cluster=() ;;
        run_dir=*) run_dir="${argument#*=}" ;;
        experiment=*) experiment="${argument#*=}" ;;
    esac
done
address="${RAY_ADDRESS:-http://127.0.0.1:8265}"
[[ "$address" =~ ^https?://[^/]+ ]] || fail "RAY_ADDRESS=$address: jobs are taken at http://HOST:PORT, by default port 8265"
ray="${RAY:-$VENV/bin/ray}"
[[ -x "$ray" ]] || ray="$(command -v ray)" || fail "there is no ray command; run launch/test.sh once to make .venv, or set RAY to its path"
python="$(dirname "$ray")/python"
[[ -x "$python" ]] || python="$(command -v python3)" || fail "there is no Python beside $ray"
[[ -n "$run_dir" ]] || say "no run_dir= given: results stay in the job's working directory, which Ray removes in time"
[[ -n "$id" ]] || id="$experiment-$(date +%Y%m%d-%H%M%S)-$$"

ray_token
answer="$("$python" -c '
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/api/version", timeout=10).read()
except urllib.error.HTTPError as error:
    print("" if error.code in (401, 403) else error)  # it wants the token, which ray sends
except (OSError, ValueError) as error:
    print(getattr(error, "reason", error))
' "$address")"
[[ -z "$answer" ]] || fail "no Ray takes jobs at $address: $answer"

environment="$(mktemp)" # a file, closed to others: a command line is seen by everybody on this machine
trap 'rm -f "$environment"' EXIT
"$python" - "$environment" "$STOP_S" "${names[@]}" <<'PYTHON'
import json, os, sys

path, stop_s, *names = sys.argv[1:]
excludes = ["/.venv*/", "/runs/", "/.git", "/outputs/", "/multirun/", "/wandb/", "/dist/", "/build/", "__pycache__/", ".*_cache/", "/.hypothesis/"]
variables = {"RAY_JOB_STOP_WAIT_TIME_S": stop_s} | {name: os.environ[name] for name in names}
with open(path, "w") as file:
    json.dump({"excludes": excludes, "env_vars": variables}, file)
PYTHON

options=(--address "$address" --working-dir . --runtime-env "$environment" --submission-id "$id")
[[ -n "$wait" ]] || options+=(--no-wait)
say "submitting $id to $address: termrsi ${cluster[*]} $*"
trap 'say "the job goes on; its log: ray job logs --follow --address $address $id; its end: ray job stop --address $address $id"; exit 130' INT
status=0
"$ray" job submit "${options[@]}" -- python -m termrsi "${cluster[@]}" "$@" || status=$?
[[ -n "$wait" ]] || exit "$status"

# Ray tells a job that was stopped from one that succeeded by a word alone, and one failure from another by nothing.
read -r state code <<<"$("$python" - "$address" "$id" <<'PYTHON'
import sys

from ray.job_submission import JobSubmissionClient

try:
    info = JobSubmissionClient(sys.argv[1]).get_job_info(sys.argv[2])
    print(info.status.value, 1 if info.driver_exit_code is None else info.driver_exit_code)
except (RuntimeError, ConnectionError) as error:
    print("UNKNOWN", 1, error)
PYTHON
)"
case "$state" in
    SUCCEEDED) exit 0 ;;
    FAILED) exit "$((${code%% *} == 0 ? 1 : ${code%% *}))" ;;
    STOPPED)
        say "$id was stopped; submitted again with the same arguments, it goes on from run_dir"
        exit 143
        ;;
    *) fail "the log of $id ended, but not the job (it is ${state:-unknown}): ray job logs --follow --address $address $id" ;;
esac
