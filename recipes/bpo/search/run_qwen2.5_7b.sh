#!/usr/bin/env bash
# BPO on questions over a corpus with Qwen2.5-7B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

GPUS=${GPUS:-4}
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train bpo search qwen2.5_7b "$@"
