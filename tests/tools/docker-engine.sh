#!/usr/bin/env bash
# docker-engine.sh DIR: Debian's or Ubuntu's own Docker (docker.io, containerd, runc), unpacked into DIR and not installed, for the
# tests of the cluster's nodes. Kept between runs. DIR/root holds it; DIR/image.tar is an image of one small static program.
set -euo pipefail

readonly PACKAGES=(docker.io containerd runc) STAMP=1

die() {
  echo "docker-engine: $*" >&2
  exit 1
}

unpack() { # DIR
  local work
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$work'" RETURN
  (cd "$work" && apt-get -qq download "${PACKAGES[@]}" 2>/dev/null) || die "apt-get cannot fetch ${PACKAGES[*]}: apt-get update"
  rm -rf "${1:?}/root"
  mkdir -p "$1/root"
  local package
  for package in "$work"/*.deb; do dpkg-deb -x "$package" "$1/root"; done
  "$1/root/usr/sbin/dockerd" --version >/dev/null 2>&1 || die "its dockerd does not start on this machine"
}

make_image() { # DIR
  local work
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$work'" RETURN
  mkdir "$work/bin"
  gcc -static -O1 -o "$work/bin/wait" -x c - <<'C'
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* wait [ignore | STATUS]: until SIGTERM, or ends with STATUS */
static void end(int sig) { _exit(sig == SIGTERM ? 0 : 1); }
int main(int argc, char **argv) {
    int ignore = argc > 1 && !strcmp(argv[1], "ignore");
    if (write(1, "waiting\n", 8) < 0)
        return 1;
    if (argc > 1 && !ignore)
        return atoi(argv[1]);
    signal(SIGTERM, ignore ? SIG_IGN : end);
    for (;;)
        pause();
}
C
  tar -C "$work" -cf "$1/image.tar" bin
}

main() {
  [ $# = 1 ] || die "usage: docker-engine.sh DIR"
  umask 022
  mkdir -p "$1"
  exec 9>"$1.lock"
  flock 9
  if [ "$(cat "$1/stamp" 2>/dev/null)" != $STAMP ]; then
    unpack "$1"
    make_image "$1"
    echo $STAMP >"$1/stamp"
  fi
}

main "$@"
