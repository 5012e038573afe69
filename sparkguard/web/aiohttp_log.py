"""What aiohttp logs about clients, without a word of theirs: its exceptions quote what they sent, prompts and keys among it."""

from __future__ import annotations

import logging
import traceback

from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger("sparkguard.front")


class WithoutWords(logging.Filter):
    """A request that is no HTTP, and a client that leaves within its answer, are at the level debug a line: whoever reaches the
    port can make any number. What else goes wrong is a bug of ours, and where it is stays in the log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        record.exc_info, record.exc_text = None, None
        kind, said = type(error).__name__, record.getMessage()
        if isinstance(error, (HttpProcessingError, ConnectionError)):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            record.msg, record.args = f"{said}: {kind}", ()
            return log.isEnabledFor(logging.DEBUG)
        record.msg, record.args = f"{said}: {kind}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip(), ()
        return True


log.addFilter(WithoutWords())
