"""The API keys, as the front and who asks it read them from one file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe.files import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

CREDENTIAL = "spark-api-key"  # its name in LoadCredential=
_MOST_BYTES = 1 << 20


def read_keys(path: str, env: Mapping[str, str]) -> tuple[bytes, ...]:
    """The keys of SPARK_API_KEY_FILE, else of the systemd credential; one a line; empty: no key is asked for.

    Raises SparkguardError for a file that cannot be read or has no key: a door that was to be locked does not stay open.
    """
    credential = os.path.join(env["CREDENTIALS_DIRECTORY"], CREDENTIAL) if env.get("CREDENTIALS_DIRECTORY") else ""
    if not path and not os.path.exists(credential):
        return ()
    source = path or credential
    try:
        lines = read_file(source, _MOST_BYTES).split(b"\n")
    except OSError as error:
        raise SparkguardError(f"the API key in {source} cannot be read: {error.strerror}", status=OSERR) from None
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys:
        raise SparkguardError(f"there is no API key in {source}", "write one a line, or unset SPARK_API_KEY_FILE")
    if any(byte < 32 or byte == 127 for key in keys for byte in key):
        raise SparkguardError(f"an API key in {source} has a character that no request can carry", "write it anew")
    return keys
