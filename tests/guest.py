"""Guest: a kept machine of guest.sh with a real systemd, as the tests use it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCRIPT = Path(__file__).with_name("guest.sh")
REPOSITORY = SCRIPT.parents[1]
CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
NEVER_CAME_UP = 125  # guest.sh's status
# The VM computes about 20 times slower; what waits for systemd rather than for the processor is slowed down less.
PATIENCE = {"ns": 1, "tcg": 10}

# Leaves the user spark as if nobody had ever logged in. Run as root.
FRESH = r"""
as_spark() { setpriv --reuid=spark --regid=spark --init-groups env XDG_RUNTIME_DIR=/run/user/6666 "$@"; }
ours=('vllm-*' 'spark*' 'test-*' 'run-*' inference.slice)
as_spark systemctl --user --no-block stop "${ours[@]}"
as_spark systemctl --user --signal=KILL kill "${ours[@]}" 2>/dev/null
as_spark systemctl --user stop "${ours[@]}"
for pid in $(cat /sys/fs/cgroup/system.slice/guest.service/cgroup.procs); do
  if [ "$(stat -c %U /proc/$pid 2>/dev/null)" = spark ]; then kill -KILL $pid; fi
done
find /home/spark /mnt/ctl/out /tmp/ -mindepth 1 \( -user spark -o -path '/home/*' -o -path '/mnt/*' \) -delete
rm -rf /run/user/6666/sparkguard /run/user/6666/systemd/{user,user.control}
[ -e /run/guest.environment ] || as_spark systemctl --user show-environment | cut -d= -f1 | sort >/run/guest.environment
mapfile -t added < <(as_spark systemctl --user show-environment | cut -d= -f1 | sort | comm -13 /run/guest.environment -)
[ ${#added[@]} = 0 ] || as_spark systemctl --user unset-environment "${added[@]}"
as_spark systemctl --user daemon-reload
as_spark systemctl --user reset-failed
"""


class Guest:
    """One guest, from start() to stop(). Timeouts are in seconds and are stretched for the slow VM."""

    def __init__(self, backend: str, name: str, share: Path = REPOSITORY) -> None:
        self.backend = backend
        self.name = name
        self.share = share
        self.patience = PATIENCE[backend]
        self.out = CACHE / f"guest-{name}" / "ctl" / "out"  # is $GUEST_OUT inside; the guest's users may write to it

    def start(self) -> None:
        """Boots it. A VM gets a second try: under load an emulated boot sometimes runs into a timeout of systemd's own."""
        for attempt in ("first", "last"):
            done = self._guest("start", timeout=300)
            if done.returncode == 0:
                return
            if self.backend == "ns" or attempt == "last":
                raise RuntimeError(f"the guest did not come up: status {done.returncode}\n{done.stderr}")

    def stop(self) -> None:
        self._guest("stop", timeout=60)

    def exec(
        self,
        command: str | Sequence[str],
        *,
        user: str = "spark",
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a bash script (a str) or a program with arguments, in the repository's folder; status 124 is the timeout.

        With check, a status other than 0 raises an error that shows what was printed.
        """
        script = command if isinstance(command, str) else shlex.join(command)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
        limit = int(timeout * self.patience)
        options = ("--user", user, "--timeout", str(limit))
        done = self._guest(*options, "exec", "--", exports + script, stdin=stdin, timeout=limit + 30)
        if done.returncode == NEVER_CAME_UP or (check and done.returncode):
            raise RuntimeError(f"status {done.returncode} of: {script}\n--- stdout\n{done.stdout}--- stderr\n{done.stderr}")
        return done

    def systemctl(self, *arguments: str, timeout: float = 60, check: bool = False) -> subprocess.CompletedProcess[str]:
        """systemctl --user ..."""
        return self.exec(["systemctl", "--user", *arguments], timeout=timeout, check=check)

    def show(self, unit: str, name: str) -> str:
        """One property of a user unit."""
        return self.systemctl("show", "--property", name, "--value", "--", unit, check=True).stdout.strip()

    def until(self, condition: str, timeout: float = 30) -> None:
        """Waits until a bash command succeeds. For what sends no event that a test could wait for."""
        script = f"exec 9<> <(:); until {{ {condition}\n}} >/dev/null 2>&1; do read -t 0.05 -u 9 || :; done"
        done = self.exec(script, timeout=timeout)
        if done.returncode:
            raise TimeoutError(f"status {done.returncode} (124 is the timeout) of waiting for: {condition}\n{done.stderr}")

    def fresh(self) -> None:
        """Stops all units and processes of the tests and empties spark's home, so that tests do not see each other."""
        self.exec(FRESH, user="root", timeout=60, check=True)

    def _guest(self, *arguments: str, timeout: float, stdin: str = "") -> subprocess.CompletedProcess[str]:
        root = () if os.geteuid() == 0 else ("sudo", "-n", f"SPARKGUARD_TEST_CACHE={CACHE}")
        common = ("--backend", self.backend, "--name", self.name, "--share", str(self.share))
        return subprocess.run(
            [*root, str(SCRIPT), *common, *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout,
            check=False,
        )
