"""An OpenAI-compatible server for the rig, run as a container's process: models, streaming chat with usage, vLLM's metrics.

behaviour.json in the rig's docker folder changes it while it runs, by the container's name or "*": served, ready (false:
503 everywhere), exit_code (ends at once), oom, log (written at start), stuck (completions hang), token_seconds, tokens,
ignore_term, drain_seconds, port, no_usage, metrics (more text).
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOLDER = os.environ["CONTAINER"]
NAME = os.environ["CONTAINER_NAME"]
ARGUMENTS = sys.argv[1:]
BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5)
counts = {"prompt": 0, "generated": 0, "requests": 0, "running": 0, "ttft_sum": 0.0}
buckets = dict.fromkeys(BUCKETS, 0)
lock = threading.Lock()
started = time.time()


def behaviour():
    try:
        with open(os.path.join(os.environ["RIG"], "docker", "behaviour.json")) as file:
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return {**known.get("*", {}), **known.get(NAME, {})}


def argument(*names, default=None):
    for index, word in enumerate(ARGUMENTS):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else ARGUMENTS[index + 1]
    return default


def served():
    name = behaviour().get("served") or argument("--served-model-name", "--model-name") or os.environ.get("NIM_SERVED_MODEL_NAME")
    return name or argument("--model", "--alias") or (ARGUMENTS[1] if ARGUMENTS[:1] == ["serve"] else "model")


def port():
    return int(behaviour().get("port") or argument("--port") or os.environ.get("NIM_HTTP_API_PORT") or 8000)


def is_headless():
    return "--headless" in ARGUMENTS or argument("--node-rank", default="0") != "0" or os.environ.get("NIM_NODE_RANK", "0") != "0"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def say(self, status, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if behaviour().get("ready") is False:
            return self.say(503, {"error": {"message": "loading"}})
        if path in ("/health", "/ping", "/v1/health/ready", "/v1/health/live"):
            return self.say(200, b"")
        if path == "/v1/models":
            length = int(argument("--max-model-len", "--context-length", default="32768"))
            card = {"id": served(), "object": "model", "owned_by": "vllm", "max_model_len": length}
            return self.say(200, {"object": "list", "data": [card]})
        if path in ("/metrics", "/v1/metrics"):
            return self.say(200, metrics().encode(), "text/plain; version=0.0.4")
        return self.say(404, {"error": {"message": "no such path"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        now = behaviour()
        if now.get("ready") is False or (now.get("port") is None and asked.get("model") not in (served(), None)):
            return self.say(
                404, {"error": {"message": "The model `{}` does not exist.".format(asked.get("model")), "type": "NotFoundError"}}
            )
        if now.get("error_body"):
            return self.say(200, {"error": {"message": now["error_body"]}})
        chat = self.path.endswith("/chat/completions")
        prompt = json.dumps(asked.get("messages") or asked.get("prompt") or "")
        prompt_tokens = max(1, len(prompt.split()))
        wanted = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or now.get("tokens") or 16)
        with lock:
            counts["running"] += 1
        begun = time.monotonic()
        try:
            while behaviour().get("stuck"):
                time.sleep(0.02)
            if behaviour().get("prefill_seconds"):
                time.sleep(behaviour()["prefill_seconds"])
            if asked.get("stream"):
                self.stream(asked, chat, prompt_tokens, wanted, begun)
            else:
                text = " ".join(self.tokens(wanted, begun, prompt_tokens))
                message = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                choice = {"index": 0, "finish_reason": "length", **message}
                self.say(
                    200,
                    {
                        "id": "x",
                        "object": "chat.completion",
                        "model": served(),
                        "choices": [choice],
                        "usage": usage(prompt_tokens, wanted),
                    },
                )
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with lock:
                counts["running"] -= 1
                counts["requests"] += 1

    def tokens(self, wanted, begun, prompt_tokens):
        for index in range(wanted):
            if behaviour().get("token_seconds"):
                time.sleep(behaviour()["token_seconds"])
            with lock:
                if not index:
                    seconds = time.monotonic() - begun
                    counts["prompt"] += prompt_tokens
                    counts["ttft_sum"] += seconds
                    for edge in BUCKETS:
                        buckets[edge] += seconds <= edge
                counts["generated"] += 1
            yield f"word{index}"

    def stream(self, asked, chat, prompt_tokens, wanted, begun):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def send(value):
            text = value if isinstance(value, str) else json.dumps(value)
            data = (f"data: {text}\n\n").encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        head = {"id": "x", "object": "chat.completion.chunk", "model": served()}
        if chat:
            send({**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for word in self.tokens(wanted, begun, prompt_tokens):
            part = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            send({**head, "choices": [{"index": 0, "finish_reason": None, **part}]})
        send({**head, "choices": [{"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}]})
        if not behaviour().get("no_usage"):
            send({**head, "choices": [], "usage": usage(prompt_tokens, wanted)})
        send("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


def usage(prompt_tokens, wanted):
    return {"prompt_tokens": prompt_tokens, "completion_tokens": wanted, "total_tokens": prompt_tokens + wanted}


def metrics():
    name = served()
    label = f'{{model_name="{name}",engine="0"}}'
    with lock:
        now, edges = dict(counts), dict(buckets)
    rows = [
        ("gauge", "vllm:num_requests_running", now["running"]),
        ("gauge", "vllm:num_requests_waiting", 0),
        ("gauge", "vllm:kv_cache_usage_perc", 0.25),
        ("counter", "vllm:prompt_tokens_total", now["prompt"]),
        ("counter", "vllm:generation_tokens_total", now["generated"]),
    ]
    lines = []
    for kind, series, value in rows:
        lines += [f"# TYPE {series} {kind}", f"{series}{label} {value}"]
    lines.append("# TYPE vllm:request_success_total counter")
    lines.append(f'vllm:request_success_total{{model_name="{name}",engine="0",finished_reason="length"}} {now["requests"]}')
    lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started}"]
    series = "vllm:time_to_first_token_seconds"
    lines.append(f"# TYPE {series} histogram")
    for edge, number in [*edges.items(), ("+Inf", now["requests"])]:
        lines.append(f'{series}_bucket{{model_name="{name}",engine="0",le="{edge}"}} {number}')
    lines += [f"{series}_count{label} {now['requests']}", f"{series}_sum{label} {now['ttft_sum']}"]
    return "\n".join(lines) + "\n" + behaviour().get("metrics", "")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self):  # without the name server that the standard one asks for its own name
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "rig", self.server_address[1]


def main():
    first = behaviour()
    print(first.get("log", "INFO engine of the rig: {}".format(" ".join(ARGUMENTS))), flush=True)
    if first.get("oom"):
        with open(FOLDER + "/oom", "w"):
            pass
        sys.exit(137)
    if "exit_code" in first:
        sys.exit(first["exit_code"])
    ended = threading.Event()

    def term(*_):
        if not behaviour().get("ignore_term"):
            ended.set()

    signal.signal(signal.SIGTERM, term)
    if not is_headless():
        while behaviour().get("ready") is False and not ended.is_set():  # as long as weights are loaded, nobody listens
            ended.wait(0.02)
        if ended.is_set():
            return
        server = Server(("0.0.0.0", port()), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        print("INFO: Application startup complete.", flush=True)
    while not ended.wait(0.1):
        if "die" in behaviour():  # while it runs
            os._exit(behaviour()["die"])
    limit = time.monotonic() + behaviour().get("drain_seconds", 5)
    while counts["running"] and time.monotonic() < limit:
        time.sleep(0.01)
    print("INFO: shut down", flush=True)


main()
os._exit(0)
