"""The one exception, and the one table of exit statuses.


An entry point catches SparkguardError once, prints the message and the hint to stderr, and returns the status.
A refusal is not an error: it is a Verdict (core/types.py).
"""

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 69
SOFTWARE = 70
OSERR = 71
TEMPFAIL = 75
CONFIG = 78
NOT_FOUND = 127
INTERRUPTED = 130

# Numbers and names from sysexits.h, which systemd prints by name; 2 is click's, 127 and 130 are the shell's.
STATUSES = {
    OK: ("SUCCESS", "admitted, or done"),
    FAILED: ("FAILURE", "a start on the cluster failed, or a model did not become ready in time"),
    USAGE: ("INVALIDARGUMENT", "bad arguments on the command line"),
    UNAVAILABLE: ("UNAVAILABLE", "a node, a daemon or a GPU cannot be reached"),
    SOFTWARE: ("SOFTWARE", "a bug in sparkguard"),
    OSERR: ("OSERR", "the machine cannot be read, or the reservation or the output cannot be written"),
    TEMPFAIL: ("TEMPFAIL", "refused now: others hold what it needs"),
    CONFIG: ("CONFIG", "refused always: bad or impossible configuration"),
    NOT_FOUND: ("127", "the program to start was not found"),
    INTERRUPTED: ("130", "interrupted"),
}


class SparkguardError(Exception):
    """An expected failure: what is wrong, what to do about it, and the status to exit with."""

    def __init__(self, message: str, hint: str | None = None, status: int = CONFIG) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status


def report(error: SparkguardError, program: str = "sparkguard") -> str:
    """The text that every entry point prints to stderr."""
    text = f"{program}: {error.message}\n"
    return text + f"  {error.hint}\n" if error.hint else text
