#!/usr/bin/env bash
# vllm_mem_budget.sh NAME [--json] [vllm arguments...]: may this model start now?
#
# ExecStartPre= of the units. 0: admitted, and the share is reserved for this start; 75: refused now, others hold the memory;
# 78: refused always; the reason stands on stderr, or as one JSON object on stdout.
# Only builtins before exec: this runs at each start and is measured (make bench).
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
  exec "$python" -I -c 'import sys; from sparkguard.guard import main; sys.exit(main(sys.argv[1:]))' "$@"
}

main "$@"
