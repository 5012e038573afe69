#!/usr/bin/env bash
# quickstart.sh: sets up Sparkguard in this checkout and shows the guard at work on this machine.
# It needs no GPU and no vLLM, installs nothing outside .venv, and leaves nothing running. Real guard, real processes, real /proc:
# only the servers are stand-ins (examples/demo/vllm), which take vLLM's command line and hold no memory.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
demo='' server=''

main() {
  make_venv
  demo=$(mktemp -d "${TMPDIR:-/tmp}/sparkguard-demo.XXXXXX")
  trap clean_up EXIT
  trap 'exit 130' INT TERM
  write_specs
  show_the_guard
  cat <<'EOF'

That is the guard. Next:
  ./install.sh                        launchers, units and config for your user; starts nothing
  ~/.config/spark/spark.conf          your venv's vLLM, your budget
  systemctl --user start vllm-model@NAME
  .venv/bin/sparkguard status         what holds this machine's memory now
EOF
}

die() {
  echo "quickstart.sh: $*" >&2
  exit 1
}

make_venv() {
  local python
  for python in /usr/bin/python3 python3; do
    command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' && break
    python=''
  done
  [ -n "$python" ] || die "Python 3.10 or newer is needed"
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      echo "# apt-get install python3-venv" >&2
      apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3-venv >&2
    else
      die "a system package is missing: sudo apt-get install python3-venv"
    fi
  fi
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "# setting up .venv (a minute the first time)" >&2
  PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install --quiet --upgrade . ||
    die "pip could not install the project; its message is above"
}

write_specs() {
  export HOME=$demo XDG_CONFIG_HOME=$demo/config XDG_RUNTIME_DIR=$demo/run
  mkdir -p "$demo/config/spark/models" "$demo/run"
  printf 'VLLM_BIN="%s"\nVLLM_MEM_WAIT=0\n' "$PWD/examples/demo/vllm" >"$demo/config/spark/spark.conf"
  write_spec embeddings 0.10 18001
  write_spec gemma4 0.65 18000
  write_spec vision-agent 0.75 18000
  write_spec longcontext 0.95 18000
}

write_spec() {
  printf 'VLLM_MODEL=demo/%s\nVLLM_GPU_MEM_UTIL=%s\nVLLM_PORT=%s\n' "$1" "$2" "$3" >"$demo/config/spark/models/$1.env"
}

show_the_guard() {
  local status=0
  say "An embedding server reserves 0.10. The guard admits it, and it starts:"
  echo '$ scripts/vllm-serve.sh embeddings &'
  scripts/vllm-serve.sh embeddings 2>&1 & # not by run(): this process becomes the server, and is ended by its pid
  server=$!
  wait_for 18001 || die "this machine has no room for 0.10 now, so the demonstration ends here; the reason is above"
  say "longcontext wants 0.95. 1.05 of this machine does not exist, so nothing is started:"
  run scripts/vllm_mem_budget.sh longcontext || status=$?
  [ "$status" = 78 ] || die "expected a refusal with status 78, got $status"
  say "vision-agent wants 0.75, which would fit alone, but not beside the embeddings under the default budget of 0.80:"
  status=0
  run scripts/vllm_mem_budget.sh vision-agent || status=$?
  [ "$status" = 75 ] || die "expected a refusal with status 75, got $status"
  say "Which of them can ever run together? Known before anyone starts them:"
  run .venv/bin/sparkguard plan
  say "And now, on this machine:"
  run .venv/bin/sparkguard status
}

say() {
  if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then printf '\n\033[1m%s\033[0m\n' "$*"; else printf '\n%s\n' "$*"; fi
}

run() {
  echo "\$ $*"
  "$@" 2>&1
}

wait_for() {
  local left=100
  until (: <>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do
    if ! kill -0 "$server" 2>/dev/null || [ $((left -= 1)) = 0 ]; then return 1; fi
    sleep 0.1
  done
}

clean_up() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  wait 2>/dev/null || true
  [ -z "$demo" ] || rm -rf "$demo"
}

main "$@"
