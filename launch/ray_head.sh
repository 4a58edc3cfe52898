#!/usr/bin/env bash
# Make this machine the head of a Ray cluster: launch/ray_head.sh [RAY START OPTION ...]
# Workers join with launch/ray_worker.sh ADDRESS; end it with `.venv/bin/ray stop`.
#
#   RAY_PORT             default 6379
#   RAY_DASHBOARD_HOST   default 127.0.0.1: whoever reaches the dashboard and has the token can run code here
#   RAY_AUTH_...         see ray_token in common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
cd "$ROOT"
ray_token make
exec ray start --head --port "${RAY_PORT:-6379}" --dashboard-host "${RAY_DASHBOARD_HOST:-127.0.0.1}" --disable-usage-stats "$@"
