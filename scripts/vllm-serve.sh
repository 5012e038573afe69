#!/usr/bin/env bash
# vllm-serve.sh NAME [vllm arguments...]: becomes the model's vLLM, after admission, with its environment and on its cores.
# vllm-serve.sh --release NAME: gives a reservation back (ExecStopPost= of the units).
#
# 75, 78: refused, as vllm_mem_budget.sh says; 127: no vLLM to run. Else it is the server's own status.
set -euo pipefail

python=@PYTHON@

main() {
  if [[ $python == @* ]]; then # not installed: run from a checkout
    python=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}../.venv/bin/python
  fi
  if [[ ! -x $python ]]; then
    printf '%s: there is no %s\n  run scripts/quickstart.sh in a checkout, or ./install.sh\n' "${0##*/}" "$python" >&2
    exit 127
  fi
  exec "$python" -I -c 'import sys; from sparkguard.launch import main; sys.exit(main(sys.argv[1:]))' "$@"
}

main "$@"
