#!/usr/bin/env bash
# Opens the dashboard. SPARK_SERVE_HOME names the checkout; else it is the folder that holds gui/, wherever this is called from.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
home=${SPARK_SERVE_HOME:-${here%%/gui*}}
# A program started by the desktop has the desktop's short PATH, in which neither Homebrew's nor Miniconda's Python is.
export PATH="$HOME/miniconda3/bin:/opt/homebrew/bin:/usr/local/bin:$PATH"
cd "$home"
# In a window of its own where pywebview is there, else in the browser.
if ./spark-serve ui --app --smoke >/dev/null 2>&1; then
  exec ./spark-serve ui --app
fi
exec ./spark-serve ui
