"""Who may ask a local port: by which names, and from which pages."""

from __future__ import annotations

import pytest

from sparkguard.look.gate import foreign_host, foreign_site, own_names

NAMES = own_names("127.0.0.1")
OURS = ["127.0.0.1:80", "localhost:8090", "[::1]:80", "192.168.1.10", "dash.localhost:80"]
THEIRS = ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", ""]


@pytest.mark.parametrize("host", OURS)
def test_our_names(host: str) -> None:
    """Addresses, localhost and what ends in it are ours, with a port and without."""
    assert foreign_host(NAMES, {"Host": host}) is None


@pytest.mark.parametrize("host", THEIRS)
def test_other_names(host: str) -> None:
    """A name that somebody points here is refused, and so is none at all."""
    assert foreign_host(NAMES, {"Host": host})


SITES = {
    "no browser": ({}, True),
    "our page": ({"Origin": "http://127.0.0.1:80", "Sec-Fetch-Site": "same-origin"}, True),
    "another site": ({"Origin": "http://evil.example"}, False),
    "another port of this machine": ({"Origin": "http://127.0.0.1:81"}, False),
    "a sandboxed frame": ({"Origin": "null"}, False),
    "an Origin that is no URL": ({"Origin": "http://[::"}, False),
    "a fetch that hides its page": ({"Sec-Fetch-Site": "cross-site"}, False),
}


@pytest.mark.parametrize(("headers", "ours"), SITES.values(), ids=SITES)
def test_pages(headers: dict[str, str], ours: bool) -> None:
    """Only our own page, and whatever is no browser, may change something."""
    assert (foreign_site({"Host": "127.0.0.1:80", **headers}) is None) is ours
