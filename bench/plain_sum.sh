#!/usr/bin/env bash
# The peer of the benchmark: the sum as one would write it in an afternoon. It sees one spelling of one flag, takes a
# wrapper for a second server, and knows no default, no lock and no live check.
set -u
wanted=${1:-0.10}
total=1
if command -v nvidia-smi >/dev/null; then
  total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
fi
pgrep -af 'vllm serve' |
  grep -oP '(?<=--gpu-memory-utilization[ =])[0-9.]+' |
  awk -v wanted="$wanted" -v total="${total:-1}" '{ sum += $1 } END { print sum + wanted, total; exit (sum + wanted > 0.80) }'
