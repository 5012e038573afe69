"""A song factory for the rig: protocol version 2, state in the folder's factory.json, songs that end when a test says so.

    yue_factory.py control status | drain | cancel --job-id ID | admit --generation G | manifest
    yue_factory.py serve PORT

factory.json may be changed by tests: jobs, cuda, runtime_ok, assets_ok, ownership_ok, mock, broken (words), slow (seconds).
"""

import fcntl
import json
import os
import sys
import time

API_VERSION = 2
FOLDER = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.join(FOLDER, "factory.json")
FIRST = {
    "accepting": False, "generation": None, "active_job": None, "cuda": True, "runtime_ok": True, "assets_ok": True,
    "ownership_ok": True, "mock": False, "runtime_manifest": "ab" * 32, "worker_id": None, "owned_containers": [],
}  # fmt: skip


def change(how=None):
    with open(PATH + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = dict(FIRST)
        try:
            with open(PATH) as file:
                state.update(json.load(file))
        except FileNotFoundError:
            pass
        state["worker_id"] = state["worker_id"] or "yue-" + os.uname().nodename
        if how is not None:
            how(state)
            with open(PATH + ".new", "w") as file:
                json.dump(state, file)
            os.replace(PATH + ".new", PATH)
        return state


def status(state):
    told = {key: state[key] for key in FIRST}
    return {"service": "yue-icl-factory", "api_version": API_VERSION, "busy": state["active_job"] is not None, **told}


def control(words):
    state = change()
    with open(os.path.join(FOLDER, "controls"), "a") as file:
        file.write(json.dumps(words) + "\n")
    if state.get("slow"):
        time.sleep(state["slow"])
    if state.get("broken"):
        sys.exit(state["broken"])
    verb = words[0]
    if verb == "drain":
        state = change(lambda now: now.update(accepting=False))
    elif verb == "cancel":
        job = words[words.index("--job-id") + 1]
        if (state["active_job"] or {}).get("job_id") != job:
            sys.exit("no such job: " + job)
        state = change(lambda now: now.update(active_job=None))
    elif verb == "admit":
        generation = words[words.index("--generation") + 1]
        state = change(lambda now: now.update(accepting=True, generation=generation))
    elif verb not in ("status", "manifest"):
        sys.exit("unknown control verb: " + verb)
    print(json.dumps(status(state)))


def serve(port):
    import socket
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state = change()
            data = json.dumps({**status(state), **state.get("health", {})}).encode()
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    class Server(ThreadingHTTPServer):
        def server_bind(self):  # without the name server that the standard one asks for its own name
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
            self.server_name, self.server_port = "rig", port

    Server(("0.0.0.0", port), Handler).serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "control":
        control(sys.argv[2:])
    else:
        change(lambda now: now.update(accepting=False))  # a worker that was restarted starts drained
        serve(int(sys.argv[2]))
