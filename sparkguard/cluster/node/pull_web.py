"""HTTP for a pull: patient with the network, and careful with its secrets.

Runs on a node: Linux, Python 3.8, the standard library.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request

from sparkguard.cluster.node.base import FAILED, UNAVAILABLE, Fault
from sparkguard.cluster.node.pull_base import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

_TIMEOUT_SECONDS = 60
# Attempts in a row that brought nothing; an attempt that brought a byte begins the count anew.
_ATTEMPTS = 8
_MOST_JSON = 256 << 20


class NotYet(Exception):
    """The other node will have it: no failure, and no end to the patience."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Web:
    """HTTP with this job's secrets, which go to the publisher's own host and not along a redirect to another."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opener = urllib.request.build_opener(_Redirects)
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Redirects)
        self._own = {
            "HF_TOKEN": urllib.parse.urlsplit(job.order["hf_endpoint"]).netloc,
            "NGC_API_KEY": urllib.parse.urlsplit(job.order["ngc_endpoint"]).netloc,
        }

    def open(self, url: str, secret: str = "", start: int = 0, direct: bool = False) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "spark-serve", "Accept-Encoding": "identity"})
        if start:
            request.add_header("Range", f"bytes={start}-")
        token = self._job.secrets.get(secret)
        if token and urllib.parse.urlsplit(url).netloc == self._own[secret]:
            request.add_header("Authorization", f"Bearer {token}")
        return (self._direct if direct else self._opener).open(request, timeout=_TIMEOUT_SECONDS)

    def open_mirror(self, path: str, start: int = 0) -> Any:
        """The other node's file, over the fabric and past every proxy. NotYet: it is not verified there yet."""
        try:
            return self.open(f"{self._job.order['mirror']}/{path}", "", start, direct=True)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            error.close()
            raise NotYet(self._job.order["retry_seconds"]) from None

    def json(self, url: str, secret: str) -> tuple[Any, str | None]:
        """The answer, and the address of its next page."""

        def ask() -> tuple[Any, str | None]:
            with self.open(url, secret) as response:
                after = re.search(r'<([^>]+)>\s*;\s*rel="next"', response.headers.get("Link") or "")
                body = response.read(_MOST_JSON + 1)
            if len(body) > _MOST_JSON:
                raise Fault("source", f"{url} answers more than {_MOST_JSON >> 20} MiB", FAILED)
            try:
                return json.loads(body), after.group(1) if after else None
            except ValueError:
                raise Fault("source", f"{url} answers no JSON", FAILED) from None

        return self.patiently(url, ask)

    def patiently(self, what: str, ask: Callable[[], T], moved: Callable[[], int] = lambda: 0) -> T:
        """Asks again, later and later, while it is the network or the server that fails."""
        barren, before = 0, moved()
        while True:
            self._job.check()
            try:
                return ask()
            except NotYet as later:
                self._job.stopped.wait(later.seconds)
                continue
            except urllib.error.HTTPError as error:
                reason, pause = _judge(what, error)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.filename:
                    raise  # a file's, not the network's
                reason, pause = str(getattr(error, "reason", None) or error) or type(error).__name__, None
            barren = 0 if moved() != before else barren + 1
            before = moved()
            if barren >= _ATTEMPTS:
                raise Fault("network", f"{what}: {reason}, {barren} times in a row", UNAVAILABLE)
            wait = pause if pause is not None else min(30.0, self._job.order["retry_seconds"] * 2**barren)
            self._job.tell("pull_retry", what=what, reason=reason, in_s=wait)
            self._job.stopped.wait(wait)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def _judge(what: str, error: urllib.error.HTTPError) -> tuple[str, float | None]:
    """Why to ask again, and when. Fault when asking again cannot help."""
    reason = f"status {error.code}"
    if error.code in (401, 403):
        raise Fault(
            "denied", f"{what}: {reason}: not for everybody; accept its licence, and set HF_TOKEN or NGC_API_KEY here", FAILED
        )
    if error.code in (408, 425, 429) or error.code >= 500:
        after = error.headers.get("Retry-After") or ""
        return reason, min(300.0, float(after)) if after.isdigit() else None
    raise Fault("source", f"{what}: {reason}", FAILED)
