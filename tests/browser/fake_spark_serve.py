"""A spark-serve that says what a test wrote into a folder: status.json, list.json, samples.jsonl, VERB.jsonl ...

The dashboard's one outermost edge is its child process, so this is where a test puts states that take a cluster to be in.
It appends each call to calls.jsonl, and ends a verb when the test lets it: while a file VERB.hold exists, the verb goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SPARK_SERVE"])


def main() -> int:
    argv = [one for one in sys.argv[1:] if not one.startswith("--config")]
    verb = argv[0]
    told: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: told.append(1))
    secret = sys.stdin.readline() if "--sudo-password-stdin" in argv else None
    with (FOLDER / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps({"argv": argv, "pid": os.getpid(), "secret": secret}) + "\n")
    name = "-".join(argv[:2]) if verb == "bench" else verb
    lines = FOLDER / f"{name}.jsonl"
    sent = 0
    while True:
        text = lines.read_text().splitlines() if lines.exists() else []
        for line in text[sent:]:
            print(line, flush=True)
        sent = len(text)
        if told:
            print(json.dumps({"event": "error", "words": "interrupted, cleaning up"}), flush=True)
            while (FOLDER / f"{name}.cleanup").exists():
                time.sleep(0.02)
            return 130
        if not (FOLDER / f"{name}.hold").exists():
            break
        time.sleep(0.02)
    failure = FOLDER / f"{name}.error"
    if failure.exists():
        sys.stderr.write(failure.read_text())
        return 75
    return 0


sys.exit(main())
