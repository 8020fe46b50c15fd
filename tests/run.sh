#!/usr/bin/env bash
# Sets everything up on a fresh machine and runs the tests. Arguments go to pytest: bash tests/run.sh tests/tree -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/venv.sh
ensure_venv cpu,envs,report,search,webshop,webshop-exact,swe,docs,dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check --quiet . || { echo "run: ruff format ." >&2; exit 1; }
lint-imports --no-logo --no-cache
exec python -m pytest -q --durations=15 -n 2 --dist loadscope --no-loadscope-reorder "$@"
