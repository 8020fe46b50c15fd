#!/usr/bin/env bash
# From nothing to a comparison of BPO with GRPO at matched environment steps, on a machine without a GPU.
#
#   bash recipes/quickstart/run.sh
#
# ROOT=runs/quickstart   where everything goes
# SEED=0                 seed of warm start and training
# ENV_STEPS=8000         environment steps that each method may take
# Finished parts are not done again; remove ROOT to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=${ROOT:-runs/quickstart}
SEED=${SEED:-0}
ENV_STEPS=${ENV_STEPS:-8000}
started=$SECONDS

# bash waits for what runs in the foreground before it hears a signal, and starts what runs behind it deaf to Ctrl-C.
stop() {
  trap '' INT TERM
  kill -TERM $(jobs -p) 2>/dev/null || true
  wait
  printf '\nstopped: the same command goes on from here\n' >&2 # a progress bar may stand on the line
  exit 130
}
trap stop INT TERM
run() { # COMMAND...: it can be interrupted
  "$@" &
  wait $!
}

say() { printf '\n== %s (%d:%02d)\n' "$1" $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)); }

say "1/6 environment"
source recipes/venv.sh
ensure_venv cpu,envs,report
# Trainer and rollout take turns, so both may use all cores; waiting threads must not spin.
export OMP_NUM_THREADS=$(python -c 'import os; print(min(4, os.cpu_count()))') OMP_WAIT_POLICY=PASSIVE
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

say "2/6 games"
run verl-bpo make-games "$ROOT/games" --train 400 --valid 64 --level 0
for split in train valid; do
  [ -e "$ROOT/$split.parquet" ] || run verl-bpo make-data textworld "$ROOT/$split.parquet" --root "$ROOT/games" --split $split
done

say "3/6 warm start: imitation of demonstrations with detours, stopped early"
run python recipes/imitation/train.py --out "$ROOT/warmstart-$SEED" --data "$ROOT/games" --seed "$SEED" \
  --hidden-size 64 --detours 0.5 --max-turns 6 --until-success 0.4 --steps 600 --check-every 25

train() { # NAME OVERRIDES...
  local name=$1 log="$ROOT/$1.log"
  shift
  [ -e "$ROOT/$name.done" ] && return
  rm -rf "$ROOT/dump-$name"
  VERL_FILE_LOGGER_PATH="$ROOT/$name.jsonl" verl-bpo train --config-dir recipes/quickstart --config-name quickstart \
    root="$ROOT" name="$name" bpo.seed="$SEED" bpo.max_env_steps="$ENV_STEPS" \
    actor_rollout_ref.model.path="$ROOT/warmstart-$SEED" bpo.dump_dir="$ROOT/dump-$name" "$@" >"$log" 2>&1 &
  local training=$!
  python recipes/quickstart/progress.py "$ROOT/$name.jsonl" --env-steps "$ENV_STEPS" --pid "$training" --name "$name" &
  local progress=$!
  wait "$training" || { echo "$name failed, see $log:" >&2; grep -v Warning "$log" | tail -n 15 >&2; exit 1; }
  wait "$progress"
  touch "$ROOT/$name.done"
}

say "4/6 training BPO"
train "bpo-$SEED" algorithm.adv_estimator=bpo bpo.preset=guided

say "5/6 training GRPO with as many environment steps"
train "grpo-$SEED" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8

say "6/6 report"
shopt -s nullglob
runs=()
for file in "$ROOT"/bpo-*.jsonl; do runs+=("BPO=$file"); done
for file in "$ROOT"/grpo-*.jsonl; do runs+=("GRPO=$file"); done
run verl-bpo report compare "${runs[@]}" --out "$ROOT/report"
run verl-bpo report trees "$ROOT/dump-bpo-$SEED" --out "$ROOT/report/trees.html" --png "$ROOT/report/tree.png"
verl-bpo report recompute "$ROOT/dump-bpo-$SEED" | tail -n 1
say "done: look at $ROOT/report/index.html, tree.png and trees.html"
