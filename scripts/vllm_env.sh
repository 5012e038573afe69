#!/usr/bin/env bash
# CPU isolation and environment profile, for shells and scripts that start a vLLM of their own.
#
#   . vllm_env.sh      exports the profile's variables and SPARK_CPUS: taskset -c "$SPARK_CPUS" vllm serve ...
#   vllm_env.sh        prints what it comes to: cpus=0-15 of 0-19 share=0.80
#
# Sourced, it leaves nothing behind but what it exports, and sets no options: the shell is the caller's.

_spark_python=@PYTHON@

_spark_launch() { # --env | --cpus
  if [[ $_spark_python == @* ]]; then # not installed: run from a checkout
    _spark_python=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}../.venv/bin/python
  fi
  if [[ ! -x $_spark_python ]]; then
    printf 'vllm_env.sh: there is no %s\n  run scripts/quickstart.sh in a checkout, or ./install.sh\n' "$_spark_python" >&2
    return 127
  fi
  "$_spark_python" -I -c 'import sys; from sparkguard.launch import main; sys.exit(main(sys.argv[1:]))' "$1"
}

_spark_export() { # the lines are KEY=VALUE and are never evaluated
  local lines line status=0
  lines=$(_spark_launch --env) || status=$?
  unset -f _spark_launch _spark_export
  unset -v _spark_python
  ((status == 0)) || return "$status"
  while IFS= read -r line; do
    export "${line?}"
  done <<<"$lines"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  _spark_launch --cpus
else
  _spark_export
fi
