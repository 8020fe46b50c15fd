#!/usr/bin/env bash
# RLOO on WebShop with Qwen2.5-1.5B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

GPUS=${GPUS:-2}
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train rloo webshop qwen2.5_1.5b "$@"
