#!/usr/bin/env bash
# RLOO on SWE-bench with Llama-3.1-8B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
GPUS=${GPUS:-8}
TP=2
PROMPTS=16 # tasks a step
GROUP=8 # trajectories a task
EXECUTION=${EXECUTION:-container} # or local: as the instances were prepared

source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train swebench \
  algorithm.adv_estimator=rloo \
  actor_rollout_ref.rollout.n=$GROUP \
  data.train_batch_size=$PROMPTS \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
  bpo.env.execution=$EXECUTION \
  trainer.n_gpus_per_node=$GPUS \
  trainer.experiment_name=rloo_swebench_llama3.1_8b \
  "$@"
