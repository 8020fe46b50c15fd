#!/usr/bin/env bash
# GRPO on SWE-bench with Qwen2.5-7B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

GPUS=${GPUS:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train grpo swebench qwen2.5_7b "$@"
