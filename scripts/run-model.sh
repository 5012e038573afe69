#!/usr/bin/env bash
# run-model.sh NAME|UNIT: switches the model on a port, when the guard admits it; run-model.sh --help tells the whole story.
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
  exec "$python" -I -c 'import sys; from sparkguard.run_model import main; sys.exit(main(sys.argv[1:]))' "$@"
}

main "$@"
