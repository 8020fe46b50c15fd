#!/usr/bin/env bash
# GRPO on SWE-bench with Llama-3.1-8B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

GPUS=${GPUS:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train grpo swebench llama3.1_8b "$@"
