#!/usr/bin/env bash
# Every check, in one command: launch/test.sh [PYTEST ARGUMENT ...], for example launch/test.sh tests/unit -k config
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# The Docker and gVisor backends are tested too, where this is root: the first on a daemon that the tests start, if none answers.
if [[ $EUID -eq 0 ]]; then
    NEEDED+=(runsc:runsc busybox:busybox-static)
    if ! docker version >/dev/null 2>&1; then
        NEEDED+=(docker:docker.io dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap)
    fi
fi
# Harbor needs a newer Python: what is compared with it is tested where there is one.
harbor_environment() {
    local candidate python="" venv="$ROOT/.venv-harbor"
    [[ -x "$venv/bin/harbor" ]] && return
    for candidate in python3.14 python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then python="$candidate"; fi
    done
    if [[ -z "$python" ]]; then
        say "no Python 3.12 or newer: tests against Harbor are skipped"
        return
    fi
    say "making .venv-harbor with $("$python" --version), for tests against Harbor"
    rm -rf "$venv"
    if ! { "$python" -m venv "$venv" && "$venv/bin/pip" install -q --disable-pip-version-check harbor==0.26.0 "transformers>=5.16.1,<5.20"; }; then
        say "Harbor could not be installed: tests against it are skipped"
        rm -rf "$venv"
    fi
}
# Two peers whose formulas are compared with ours. Only files of theirs are installed; what those import is .venv's.
peers_environment() {
    local venv="$ROOT/.venv-peers" wanted=(verl==0.9.1 trl==1.16.0) now
    local packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    now="$VENV $("$VENV/bin/python" --version) ${wanted[*]}"
    [[ -f "$venv/.termrsi-stamp" && "$(<"$venv/.termrsi-stamp")" == "$now" ]] && return
    say "making .venv-peers, for tests against verl and TRL"
    rm -rf "$venv"
    # verl's bound on Python is for parts of it that are not loaded.
    if "$VENV/bin/python" -m venv --without-pip "$venv" &&
        "$VENV/bin/python" -m pip --python "$venv/bin/python" install -q --disable-pip-version-check \
            --no-deps --ignore-requires-python "${wanted[@]}" &&
        "$VENV/bin/python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/of_termrsi.pth"; then
        printf '%s' "$now" >"$venv/.termrsi-stamp"
    else
        say "verl and TRL could not be installed: tests against them are skipped"
        rm -rf "$venv"
    fi
}
harbor_environment & # beside the rest of the set-up: neither waits for the other
background=("$!")
trap 'kill "${background[@]}" 2>/dev/null && wait "${background[@]}" || true' EXIT
setup
peers_environment
wait "${background[0]}" || true # it has said why
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE=1

lines=() failed=()

# Runs a step whatever became of the ones before it, and keeps its line for the end.
step() {
    local name="$1" start_s=$SECONDS result=ok
    shift
    say "$name"
    "$@" || result=FAILED
    [[ "$result" == ok ]] || failed+=("$name")
    lines+=("$(printf '%-12s %5d s  %s' "$name" $((SECONDS - start_s)) "$result")")
}

step "ruff format" ruff format --check .
step "ruff check" ruff check .
step "pyright" pyright
step "lint-imports" lint-imports
if [[ $# -gt 0 ]]; then
    step "pytest" python -m pytest "$@"
else
    # Side by side, for they mostly wait; what the first prints is shown after the second. Those that look for what is left on the
    # whole machine come last, alone.
    log="$(mktemp)"
    python -m pytest -o cache_dir=.pytest_cache/contract tests/contract tests/bench >"$log" 2>&1 &
    background+=("$!")
    contract() { local result=0; wait "${background[1]}" || result=$?; cat "$log"; rm -f "$log"; return "$result"; }
    step "pytest" python -m pytest --ignore=tests/contract --ignore=tests/bench --ignore=tests/flow/test_real_run.py
    step "contract" contract
    step "whole runs" python -m pytest -o cache_dir=.pytest_cache/runs tests/flow/test_real_run.py
fi

printf '\n'
printf '%s\n' "${lines[@]}"
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "$(IFS=,; printf '%s' "${failed[*]}" | sed 's/,/, /g')"
    exit 1
fi
printf 'all passed\n'
