# Sourced by every recipe: `train METHOD ENVIRONMENT POLICY OVERRIDES...` writes the prompt files that are missing and starts the
# trainer with recipes/config/ENVIRONMENT.yaml, method/METHOD.yaml and policy/POLICY.yaml. Variables of a recipe:
#   MODEL=...               another checkpoint than the policy's own
#   GPUS=...                GPUs of this machine; the recipe says how many by default
#   DATA=data/ENVIRONMENT   (runs/smoke/ENVIRONMENT) folder of the prompt files
#   EXECUTION=container     (swebench) or local: as the instances were prepared
#   SMOKE=1                 the same recipe with a tiny model for two steps, on a CPU
# `verl-bpo train --dry-run RECIPE` runs a recipe with VERL_BPO_DRY_RUN=1, to read its overrides.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
SMOKE=${SMOKE:-}

# usage: prompts ENVIRONMENT SPLIT...
prompts() {
  local environment=$1 split
  shift
  for split in "$@"; do
    [ -e "$DATA/$split.parquet" ] ||
      verl-bpo make-data "$environment" "$DATA/$split.parquet" --split "$split" ${SMOKE:+--panel 4}
  done
}

prepare_alfworld() {
  if [ -n "$SMOKE" ]; then
    verl-bpo make-games --kind alfworld "$DATA/games" --train 24 --valid 6
    export ALFWORLD_DATA=$(realpath "$DATA/games")
  fi
  prompts alfworld train valid_seen valid_unseen
}

prepare_webshop() {
  prompts webshop train test
}

prepare_search() {
  if [ -n "$SMOKE" ]; then
    verl-bpo make-games --kind search "$DATA/questions" --train 64 --valid 8 --level 3
    for split in train test; do
      [ -e "$DATA/$split.parquet" ] ||
        verl-bpo make-data search "$DATA/$split.parquet" --root "$DATA/questions" --split "${split/test/valid}" --panel 4
    done
  else
    : "${SEARCH_DATA:?set it to the folder with train.parquet and test.parquet, and SEARCH_RETRIEVER: docs/environments.md}"
    prompts search train test
  fi
}

# The smoke mode repairs small generated packages in local shells instead.
prepare_swebench() {
  local split
  if [ -n "$SMOKE" ]; then
    verl-bpo make-games --kind repair "$DATA/repairs" --train 16 --valid 4
    for split in train verified; do
      [ -e "$DATA/$split.parquet" ] ||
        verl-bpo make-data repair "$DATA/$split.parquet" --root "$DATA/repairs" --split "${split/verified/valid}" --panel 4
    done
  else
    : "${SWEBENCH_DATA:?set it to the folder in which verl-bpo prepare swebench made train and verified: recipes/README.md}"
    prompts swebench train verified
  fi
}

# A policy of a few thousand weights, with a tokenizer of its own, that has seen a handful of expert episodes.
tiny_model() {
  local prompt=(--list-actions --context window --window-turns 2)
  if [ "$1" = swebench ]; then
    prompt=(--data "$DATA/repairs" --no-list-actions --context full --max-observation-tokens 2048)
    set -- repair
  elif [ "$1" = search ]; then
    prompt=(--data "$DATA/questions" --no-list-actions --context full --max-observation-tokens 512 --vocab-size 512)
  fi
  python recipes/imitation/train.py --env "$1" --out "$DATA/model" --games 6 --held-out 2 --steps 2 --check-every 2 --max-turns 2 \
    --until-success 0 --overwrite --hidden-size 32 --heads 2 --template think_action "${prompt[@]}"
  echo "SMOKE=1: this model has learned next to nothing. It tries the script; what it wins means nothing."
}

train() {
  local method=$1 environment=$2 policy=$3 smoke=()
  shift 3
  DATA=${DATA:-$([ -n "$SMOKE" ] && echo runs/smoke || echo data)/$environment}
  if [ "$environment" = swebench ] && [ -n "${EXECUTION:-}" ]; then
    set -- bpo.env.execution="$EXECUTION" "$@"
  fi
  if [ -n "$SMOKE" ]; then
    smoke=(
      actor_rollout_ref.model.path="$DATA/model" data.train_batch_size=2 bpo.updates_per_step=1
      actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1 trainer.nnodes=1
      bpo.env.max_turns=3 bpo.env.max_action_tokens=16 bpo.env.workers=2 trainer.total_training_steps=2
      trainer.val_before_train=false trainer.test_freq=2 trainer.save_freq=-1 trainer.resume_mode=disable
      actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64 data.dataloader_num_workers=0
    )
    if [ "$environment" = swebench ]; then
      smoke+=(bpo.env.name=repair bpo.env.execution=local data.max_response_length=2048)
    fi
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
  fi
  set -- --config-dir recipes/config --config-name "$environment" +method="$method" +policy="$policy" root="$DATA" \
    trainer.experiment_name="${method}_${environment}_$policy" trainer.n_gpus_per_node="$GPUS" \
    ${MODEL:+actor_rollout_ref.model.path="$MODEL"} "$@" "${smoke[@]}"
  if [ -n "${VERL_BPO_DRY_RUN:-}" ]; then
    printf '%s\0' "$@"
    exit
  fi
  export VERL_FILE_LOGGER_ROOT=${VERL_FILE_LOGGER_ROOT:-runs} # else into verl_bpo/ of this folder, among the sources
  "prepare_$environment"
  [ -z "$SMOKE" ] || tiny_model "$environment"
  exec verl-bpo train "$@"
}
