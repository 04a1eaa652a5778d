"""What systemd wants to hear of a service of Type=notify. Silent where nobody listens (no NOTIFY_SOCKET)."""

from __future__ import annotations

import contextlib
import os
import socket


class Notifier:
    """Sends states to the socket that the environment names, and takes the variables out of it: they are ours alone.

    `watchdog_seconds` is how often systemd wants WATCHDOG=1, None when it does not.
    """

    def __init__(self) -> None:
        path = os.environ.pop("NOTIFY_SOCKET", "")
        interval, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        ours = path and interval.isdecimal() and pid in ("", str(os.getpid()))
        self.watchdog_seconds = int(interval) / 1e6 if ours and int(interval) > 0 else None

    def send(self, state: str) -> None:
        """One datagram; a listener that went away is no trouble of ours."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), self._address)
