#!/usr/bin/env bash
# SAPO (Single-rollout Autoregressive Policy Optimization) on questions over a corpus with Qwen2.5-7B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

GPUS=${GPUS:-4}
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train sapo search qwen2.5_7b "$@"
