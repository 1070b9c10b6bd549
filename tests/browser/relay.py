"""A road to the server that can be closed: what goes over it then is cut off in the middle, as when a phone loses its network."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit


class Relay:
    def __init__(self, url: str) -> None:
        self._goal = (urlsplit(url).hostname, urlsplit(url).port)
        self._lock, self._open, self._sockets = threading.Lock(), True, set()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}/"
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """Whatever is under way ends, and nothing new gets through."""
        with self._lock:
            self._open, cut, self._sockets = False, self._sockets, set()
        for one in cut:
            _end(one)

    def mend(self) -> None:
        with self._lock:
            self._open = True

    def close(self) -> None:
        _end(self._door)
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            with self._lock:
                if not self._open:
                    near.close()
                    continue
                far = socket.create_connection(self._goal)
                self._sockets |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    _end(sink)


def _end(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass                                # its other side was faster
    one.close()
