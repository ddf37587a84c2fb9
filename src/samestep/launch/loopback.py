"""A free port on loopback, held from before it is known: no other program can take it in between."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


def listen() -> socket.socket:
    """A listening socket on a free loopback port. Ranks may connect before anyone accepts."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
