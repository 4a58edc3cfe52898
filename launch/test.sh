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
setup
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
step "pytest" python -m pytest "$@"

printf '\n'
printf '%s\n' "${lines[@]}"
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "$(IFS=,; printf '%s' "${failed[*]}" | sed 's/,/, /g')"
    exit 1
fi
printf 'all passed\n'
