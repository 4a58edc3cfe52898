#!/usr/bin/env bash
# Make this machine the head of a Ray cluster: launch/ray_head.sh [RAY START OPTION ...]
# Workers join with launch/ray_worker.sh ADDRESS; end it with `.venv/bin/ray stop`.
#
#   RAY_PORT             default 6379
#   RAY_DASHBOARD_HOST   default 127.0.0.1: whoever reaches the dashboard can run code here, so open it on trusted networks only
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
cd "$ROOT"
exec ray start --head --port "${RAY_PORT:-6379}" --dashboard-host "${RAY_DASHBOARD_HOST:-127.0.0.1}" --disable-usage-stats "$@"
