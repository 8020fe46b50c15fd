#!/usr/bin/env bash
# What a GPU must show, in ten minutes, with torch, triton and transformers alone (flash-attn is used if it is there).
#
#   bash benchmarks/gpu/run.sh            writes benchmarks/results/gpu_*.json
#   MODELS=tiny DEVICE=cpu OUT=/tmp/x bash benchmarks/gpu/run.sh      the same on a CPU, tiny
set -uo pipefail
cd "$(dirname "$0")/../.."
MODELS=${MODELS:-qwen2.5-1.5b qwen2.5-7b}
DEVICE=${DEVICE:-cuda}
OUT=${OUT:-benchmarks/results}
REPEATS=${REPEATS:-3}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-600}
failed=0

part() { # a part that fails or runs out of time leaves the others theirs
  local left=$((SECONDS_IN_ALL - SECONDS))
  if ((left < 5)); then echo "out of time: $*" >&2; failed=1; return; fi
  timeout "$left" python "$@" || { echo "failed: $*" >&2; failed=1; }
}

mkdir -p "$OUT"
for model in $MODELS; do
  part benchmarks/gpu/parts.py --model "$model" --device "$DEVICE" --repeats "$REPEATS" --out "$OUT"
done
for model in $MODELS; do # writes after each tree, the smallest first: what time is left decides how far it comes
  part benchmarks/packed_tree.py --model "$model" --device "$DEVICE" --repeats "$REPEATS" --out "$OUT/gpu_packed_tree_$model.json"
done
exit $failed
