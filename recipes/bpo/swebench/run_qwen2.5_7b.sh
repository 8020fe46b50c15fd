#!/usr/bin/env bash
# BPO on SWE-bench with Qwen2.5-7B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
GPUS=${GPUS:-8}
TP=2
PROMPTS=16 # tasks a step, one tree each
LEAVES=8 # trajectories a tree: the backbone and seven forks
EXECUTION=${EXECUTION:-container} # or local: as the instances were prepared

source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train swebench \
  algorithm.adv_estimator=bpo \
  bpo.preset=paper \
  bpo.budget.limit=$LEAVES \
  data.train_batch_size=$PROMPTS \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
  bpo.env.execution=$EXECUTION \
  trainer.n_gpus_per_node=$GPUS \
  trainer.experiment_name=bpo_swebench_qwen2.5_7b \
  "$@"
