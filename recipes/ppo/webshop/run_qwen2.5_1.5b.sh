#!/usr/bin/env bash
# PPO on WebShop with Qwen2.5-1.5B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
GPUS=${GPUS:-2}
PROMPTS=128 # tasks a step, one trajectory each

source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train webshop \
  algorithm.adv_estimator=gae \
  data.train_batch_size=$PROMPTS \
  actor_rollout_ref.model.path="$MODEL" \
  trainer.n_gpus_per_node=$GPUS \
  trainer.experiment_name=ppo_webshop_qwen2.5_1.5b \
  "$@"
