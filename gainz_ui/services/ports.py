"""Who listens on a port: nobody, a Gainz, or another program."""

from __future__ import annotations

import http.client
import socket


def port_state(host: str, port: int) -> str:
    """"free", "Gainz answers there" or "in use by another program"."""
    target = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    if port == 0 or not _answers(target, port):
        return "free"
    connection = http.client.HTTPConnection(target, port, timeout=2)
    try:
        connection.request("GET", "/health")
        body = connection.getresponse().read(4096)
    except (OSError, http.client.HTTPException):
        body = b""
    finally:
        connection.close()
    return "Gainz answers there" if b'"uptime_seconds"' in body else "in use by another program"


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
