"""TCP ports of this machine, asked of the kernel by a socket.

/proc/net/tcp tells them all, and costs 11 ms even where there are none: the kernel walks its whole table, which grows with the
RAM. So it is read only where a socket cannot tell.
"""

from __future__ import annotations

import errno

from sparkguard.probe import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket


def listens(proc_root: str, port: int) -> bool:
    """Whether something listens on the port, here and now."""
    if procfs.is_here(proc_root):
        if _answers(port):
            return True
        if procfs.on_a_mac(proc_root):
            return False  # other processes' sockets are told to root alone
    return port in procfs.listening_ports(proc_root)


def is_taken(proc_root: str, port: int) -> bool:
    """Whether a server would fail to bind the port on every address, as vLLM does: somebody listens on one of them."""
    if procfs.is_here(proc_root):
        return not _binds(port)
    return port in procfs.listening_ports(proc_root)


def _answers(port: int) -> bool:
    link = _tcp()
    try:
        link.settimeout(1.0)
        return link.connect_ex(("127.0.0.1", port)) == 0
    finally:
        link.close()


def _binds(port: int) -> bool:
    import _socket

    link = _tcp()
    try:
        # As servers do, so that connections of an earlier one that linger in TIME_WAIT do not count.
        link.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        link.bind(("0.0.0.0", port))
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # a privileged port is another complaint, and vLLM's own
    finally:
        link.close()
    return True


def _tcp() -> _socket.socket:
    import _socket  # socket costs 8 ms for its enums

    return _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
