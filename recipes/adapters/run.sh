#!/usr/bin/env bash
# Somebody else's environment, trained on a CPU: a tiny policy that has seen an expert for a moment, then BPO.
#
#   bash recipes/adapters/run.sh lake     Gymnasium's FrozenLake-v1; the expert walks on other lakes
#   bash recipes/adapters/run.sh guess    TextArena's GuessTheNumber-v0
#   bash recipes/adapters/run.sh number   an OpenEnv environment in process
#
# ROOT=runs/adapters   SEED=0   ENV_STEPS=6000   METHOD=bpo (or grpo, rloo)
# Further words are passed on to verl-bpo train.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
world=${1:?say which: lake, guess or number}
shift
ROOT=${ROOT:-runs/adapters}/$world
SEED=${SEED:-0}
METHOD=${METHOD:-bpo}
options=()
case $world in
  lake)
    name=gymnasium:FrozenLake-v1 expert=gymnasium:recipes/adapters/lakes.py:Lakes-v0 turns=12 start=0.55
    options=(+bpo.env.kwargs.is_slippery=false)
    ;;
  guess) name=textarena:GuessTheNumber-v0 expert=recipes/adapters/guess_expert.py:Guess turns=5 start=0.25 ;;
  number)
    name=openenv:recipes/adapters/number_server.py:NumberEnvironment
    expert=recipes/adapters/number_expert.py:Number turns=3 start=0.35
    ;;
  *) echo "no example called $world" >&2; exit 2 ;;
esac
method=(algorithm.adv_estimator="$METHOD")
[ "$METHOD" = bpo ] && method+=(bpo.preset=guided) || method+=(actor_rollout_ref.rollout.n=8)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

mkdir -p "$ROOT"
[ -e "$ROOT/train.parquet" ] || verl-bpo make-data "$name" "$ROOT/train.parquet" --limit 512
[ -e "$ROOT/valid.parquet" ] || verl-bpo make-data "$name" "$ROOT/valid.parquet" --split valid --limit 64
python recipes/imitation/train.py --env "$expert" --out "$ROOT/start-$SEED" --seed "$SEED" --games 1000 --hidden-size 64 \
  --max-turns $turns --max-action-tokens 8 --until-success $start --steps 600 --check-every 5

VERL_FILE_LOGGER_PATH="$ROOT/$METHOD-$SEED.jsonl" verl-bpo train --config-dir recipes/quickstart --config-name quickstart \
  root="$ROOT" name="$METHOD-$SEED" bpo.seed="$SEED" bpo.max_env_steps="${ENV_STEPS:-6000}" \
  actor_rollout_ref.model.path="$ROOT/start-$SEED" bpo.env.name="$name" bpo.env.max_turns=$turns \
  bpo.env.max_action_tokens=8 data.max_prompt_length=512 data.max_response_length=2048 "${options[@]}" \
  "${method[@]}" "$@"
python - "$ROOT/$METHOD-$SEED.jsonl" <<'PYTHON'
import json, sys

lines = [json.loads(line)["data"] for line in open(sys.argv[1])]
for data in lines:
    for key, value in data.items():
        if key.startswith("val-") and "/success/mean@" in key:
            print(f"{int(data.get('compute/env_steps', 0)):>7} env steps: {value:.1%} of the validation episodes won")
PYTHON
