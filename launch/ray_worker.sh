#!/usr/bin/env bash
# Join this machine to a Ray cluster: launch/ray_worker.sh HOST:PORT [RAY START OPTION ...]
# The checkout should be the head's revision: code travels with a job, installed packages do not. The head's ~/.ray/auth_token must
# be here too (or RAY_AUTH_TOKEN_PATH name a copy).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ "${1:-}" == *:* ]] || fail "give the head's address, HOST:PORT (launch/ray_head.sh prints it)"
address="$1"
shift
setup
cd "$ROOT"
ray_token
exec ray start --address "$address" --disable-usage-stats "$@"
