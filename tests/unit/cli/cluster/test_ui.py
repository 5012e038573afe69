"""spark-serve ui as a process: how the browser is told where the page is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

BROWSER = """\
#!/bin/sh
printf '%s\\n' "$@" > "{folder}/argv.new"
cp "${{1#file://}}" "{folder}/page"
ls -l "${{1#file://}}" | cut -c1-10 > "{folder}/mode"
mv "{folder}/argv.new" "{folder}/argv"
echo opened > "{folder}/pipe"
"""


def test_the_key_to_the_page_is_on_no_command_line(tmp_path: Path) -> None:
    """Every user of the machine can read those: the browser is given a file of the owner's alone, which leads to the page."""
    browser = tmp_path / "browser"
    browser.write_text(BROWSER.format(folder=tmp_path))
    browser.chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    state = tmp_path / "state"
    env = {**os.environ, "BROWSER": f"{browser} %s", "SPARK_SERVE_STATE_DIR": str(state), "HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "sparkguard.cli.cluster", "ui"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().split()[-1]
            token = url.partition("token=")[2]
            assert len(token) > 30
            assert (tmp_path / "pipe").read_text() == "opened\n"
            assert token not in (tmp_path / "argv").read_text()
            assert (tmp_path / "mode").read_text().strip() == "-rw-------"
            found = re.search(r'url=([^"]+)"', (tmp_path / "page").read_text())
            assert found is not None and found.group(1) == url
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
            assert opener.open(found.group(1), timeout=10).status == 200
        finally:
            child.send_signal(signal.SIGTERM)
    assert child.returncode == 0
    assert list(state.iterdir()) == []
