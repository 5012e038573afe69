"""Where the service keeps its files."""

from __future__ import annotations

import pytest

from sparkguard.web import service


@pytest.mark.parametrize(
    ("given", "folder"), [("/var/state", "/var/state"), ("", "/home/me/.local/state"), ("here", "/home/me/.local/state")]
)
def test_a_folder_of_the_users(given: str, folder: str) -> None:
    """XDG's variable counts only as a full path; else logs would be wherever the supervisor was started."""
    assert service.user_folder({"HOME": "/home/me", "XDG_STATE_HOME": given}, "XDG_STATE_HOME", ".local/state") == folder


def test_a_home_that_is_no_full_path() -> None:
    """It is the system's word for this user then."""
    assert service.user_folder({"HOME": "here"}, "XDG_CACHE_HOME", ".cache").startswith("/")
