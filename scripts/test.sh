#!/usr/bin/env bash
# test.sh [pytest arguments]: sets up what the tests need, then runs them all, or those that the arguments name.
# As root, or with sudo that asks for no password, it installs the Debian or Ubuntu packages that are missing. Without, the
# system tier cannot run: that is said, and the status is not 0.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
[ -t 0 ] || exec </dev/null

readonly PACKAGES=(
  python3-venv python3-dev gcc libc6-dev libsystemd-dev pkg-config # the environment, systemd-python, the stand-in for NVML
  shellcheck procps util-linux iproute2 curl
  systemd dbus dbus-user-session libpam-systemd # the guest in namespaces
  qemu-system-x86 e2fsprogs xz-utils perl-base  # the small VM
  openssh-server                                # a cluster's nodes
  chromium fonts-dejavu-core                    # the page in a browser
)
readonly TEST_SECONDS=1500 # for all of pytest, so that a test that hangs ends in a failure
readonly WORKERS=3         # at once, of what waits about as long as it computes
readonly GUESTS=2          # at once: each has its own
readonly CLUSTERS=8        # at once: their tests wait for nodes more than they compute
readonly BY_FILE=(--dist loadfile --no-loadscope-reorder) # whose tests share what takes long to make
readonly SYSTEM_CACHE=/var/cache/sparkguard-tests
export SPARKGUARD_NO_SKIPS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() {
  echo "test.sh: $*" >&2
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing_packages() {
  local package
  for package in "${PACKAGES[@]}"; do
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then echo "$package"; fi
  done
  # A package of its own since qemu 8; older ones brought it along.
  [ -x /usr/lib/qemu/virtiofsd ] || [ -x /usr/libexec/virtiofsd ] || echo virtiofsd
}

install_packages() {
  command -v dpkg-query >/dev/null || {
    say "no Debian or Ubuntu: what is missing has to be installed by hand"
    return
  }
  local missing
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ -n "$NOT_RUN" ]; then
    say "missing: ${missing[*]}"
    say "apt-get install ${missing[*]}   brings them"
    return
  fi
  as_root apt-get -qq update
  # virtiofsd is part of qemu-system-common where it has no package.
  apt-cache show virtiofsd >/dev/null 2>&1 || mapfile -t missing < <(printf '%s\n' "${missing[@]}" | grep -vx virtiofsd)
  say "installing ${missing[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 install -y --no-install-recommends "${missing[@]}" >&2
}

make_venv() {
  local python=/usr/bin/python3 extras=dev stamp
  [ -x $python ] || python=python3
  if pkg-config --exists libsystemd 2>/dev/null; then extras=dev,systemd; fi
  stamp="$("$python" --version) $extras $PWD $(cksum <pyproject.toml)"
  if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then return; fi
  say "making .venv"
  rm -rf .venv
  "$python" -m venv .venv
  .venv/bin/pip install --quiet --use-pep517 ".[$extras]" # tests/conftest.py installs the package anew whenever its sources change
  echo "$stamp" >.venv/stamp
}

make_cache() { # writable by us; guest.sh writes there as root
  as_root mkdir -p "$SPARKGUARD_TEST_CACHE"
  [ -w "$SPARKGUARD_TEST_CACHE" ] || as_root chown "$(id -u)" "$SPARKGUARD_TEST_CACHE"
}

make_vllm() {
  [ -e "$SPARKGUARD_TEST_CACHE/vllm/stamp" ] || say "making an environment with vLLM, once: about four minutes and 3.5 GB"
  tests/tools/vllm-venv.sh "$SPARKGUARD_TEST_CACHE/vllm"
}

make_llama() {
  [ -e "$SPARKGUARD_TEST_CACHE/llama/stamp" ] || say "making an environment with llama-server, once: 212 MB"
  tests/tools/llama-server.sh "$SPARKGUARD_TEST_CACHE/llama"
}

run_tests() { # MARKS [pytest arguments]
  local status=0 left=$((TEST_SECONDS - SECONDS))
  # Three runs share the time: one that has none left fails at once.
  timeout --foreground --signal=INT --kill-after=60 $((left > 0 ? left : 1)) .venv/bin/pytest -m "${1# and }" "${@:2}" || status=$?
  if [ $status = 124 ]; then say "the tests did not end within $TEST_SECONDS s"; fi
  return $status
}

main() {
  NOT_RUN=
  as_root true 2>/dev/null || NOT_RUN="system       NOT RUN: it needs root, or sudo without a password"
  install_packages
  make_venv
  local status=0 marks=
  if [ -n "$NOT_RUN" ]; then
    # Only root can make the system's; the guests, which must read it, do not run then.
    export SPARKGUARD_TEST_CACHE=${SPARKGUARD_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sparkguard-tests}
    export SPARKGUARD_NOT_RUN=$NOT_RUN
    marks=" and not system"
    mkdir -p "$SPARKGUARD_TEST_CACHE"
  else
    export SPARKGUARD_TEST_CACHE=${SPARKGUARD_TEST_CACHE:-$SYSTEM_CACHE}
    make_cache
    [ $# -gt 0 ] || make_vllm # a chosen test that needs it makes it
  fi
  [ $# -gt 0 ] || make_llama
  SECONDS=0
  if [ $# -gt 0 ]; then
    run_tests "$marks" "$@" || status=$?
  else
    run_tests "not (system or browser or cluster)" --numprocesses $WORKERS "${BY_FILE[@]}" || status=$?
    # Apart from the clusters: Chromium drops its requests when a network interface comes or goes.
    run_tests "(system or browser) and not cluster$marks" --numprocesses $GUESTS "${BY_FILE[@]}" || status=$?
    run_tests "cluster$marks" --numprocesses $CLUSTERS --maxschedchunk 1 || status=$?
  fi
  if [ $status = 0 ] && [ -n "$NOT_RUN" ]; then status=1; fi
  return $status
}

main "$@"
