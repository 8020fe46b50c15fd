#!/usr/bin/env bash
# BPO on WebShop with Llama-3.1-8B-Instruct, on GPUs of 80 GB. Settings and estimates: recipes/README.md
set -euo pipefail

GPUS=${GPUS:-4}
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
train bpo webshop llama3.1_8b "$@"
