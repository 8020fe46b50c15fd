#!/usr/bin/env bash
# RLOO on ALFWorld with Qwen2.5-1.5B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
GPUS=${GPUS:-2}
PROMPTS=16 # tasks a step
GROUP=8 # trajectories a task

source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train alfworld \
  algorithm.adv_estimator=rloo \
  actor_rollout_ref.rollout.n=$GROUP \
  data.train_batch_size=$PROMPTS \
  actor_rollout_ref.model.path="$MODEL" \
  trainer.n_gpus_per_node=$GPUS \
  trainer.experiment_name=rloo_alfworld_qwen2.5_1.5b \
  "$@"
