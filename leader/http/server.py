"""Listens, and gives each connection a thread of a bounded number: one request, one answer, and it is closed.

Whoever has not sent the head of its request in `HEAD_S`, or its body, or taken its answer, in `PATIENCE_S` is let go,
however steadily it trickles.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from leader.http.handler import Handler
from leader.http.request import Request
from leader.http.response import Response
from leader.listen import Listen, is_loopback
from protocol.errors import InvalidSetting

MOST_CONNECTIONS = 32
"""At a time; whoever comes then waits for a moment in the system's queue, and is turned away when that is over."""
TURN_S = 1.0

Answer = Callable[[Request], Response]


class HttpServer:
    """Serves from `start` to `close`. Raises `InvalidSetting` where it cannot listen there."""

    def __init__(self, listen: Listen, answer: Answer) -> None:
        if not listen.is_free():
            raise InvalidSetting(
                f"cannot listen for HTTP on {listen}: the port is in use, or not this machine's. Give another one: "
                "`sublet leader --http 127.0.0.1:7481`"
            )
        self._server = _Server(listen, answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="sublet-http", daemon=True)
        self.where = Listen(listen.host, int(self._server.server_address[1]))

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more; blocks for a moment."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, listen: Listen, answer: Answer) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self.answer = answer
        self.only_loopback = is_loopback(listen.host)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((listen.host, listen.port), Handler)

    def server_bind(self) -> None:
        """Without the base class's look for this machine's name, which may ask a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own, if one is free within a moment."""
        if not self._free.acquire(timeout=TURN_S):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's life."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever went away in the middle of an answer is nobody's concern; the rest was told by the handler."""
