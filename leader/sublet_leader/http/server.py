"""Listens, and gives each connection a thread of a bounded number: one request, one answer, and it is closed.

A request is read within bounds and in time, and answered with strict headers. Whoever has not sent its head in
`HEAD_S`, or its body, or taken its answer, in `REQUEST_TIMEOUT_S` is let go, however steadily it trickles.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from sublet_leader.http.responses import SECURITY, Request, Response, error_response
from sublet_leader.listen_address import ListenAddress, is_loopback
from sublet_protocol.domain.errors import InvalidSetting

MAX_CONNECTIONS = 32
"""At a time; whoever comes then waits for a moment in the system's queue, and is turned away when that is over."""
POLL_INTERVAL_S = 1.0

Answer = Callable[[Request], Response]


class HttpServer:
    """Serves from `start` to `close`. Raises `InvalidSetting` where it cannot listen there."""

    def __init__(self, listen: ListenAddress, answer: Answer) -> None:
        if not listen.is_free():
            raise InvalidSetting(
                f"cannot listen for HTTP on {listen}: the port is in use, or not this machine's. Give another one: "
                "`sublet leader --http 127.0.0.1:7481`"
            )
        self._server = _Server(listen, answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="sublet-http", daemon=True)
        self.where = ListenAddress(listen.host, int(self._server.server_address[1]))

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

    def __init__(self, listen: ListenAddress, answer: Answer) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self.answer = answer
        self.only_loopback = is_loopback(listen.host)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((listen.host, listen.port), HttpRequestHandler)

    def server_bind(self) -> None:
        """Without the base class's look for this machine's name, which may ask a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own, if one is free within a moment."""
        if not self._free.acquire(timeout=POLL_INTERVAL_S):
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


log = logging.getLogger(__name__)

HEAD_S = 3.0
"""For a request's line and headers: connections that say nothing are soon out of the others' way."""
REQUEST_TIMEOUT_S = 10.0
"""For a request's body, and for taking the answer."""
MAX_BODY = 65_536
MAX_FIELDS = 20


class _Timely(io.RawIOBase):
    """A socket's bytes until a deadline, though each single one may come in time."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self.deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class HttpRequestHandler(BaseHTTPRequestHandler):
    """One connection, and so one request: keeping connections would keep threads."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sublet", ""

    def setup(self) -> None:
        """Read by the clock, not by the packet."""
        super().setup()
        self._timely = _Timely(self.connection, time.monotonic() + HEAD_S)
        self.rfile = io.BufferedReader(self._timely)
        self.close_connection = True

    def __getattr__(self, name: str) -> Any:
        """The base class looks for `do_GET` and so on: all methods go one way."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def log_message(self, format: str, *args: Any) -> None:
        """For those who debug: a probe a second is no news."""
        log.debug("%s: " + format, self.client_address[0], *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request, as JSON too."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or "GET"
        self._send(error_response(code, message or "this is not HTTP as it should be"))

    def _answer(self) -> None:
        self.close_connection = True
        self._timely.deadline = time.monotonic() + REQUEST_TIMEOUT_S
        try:
            response = self._respond()
        except TimeoutError:
            response = error_response(408, f"the request's body took longer than {REQUEST_TIMEOUT_S:g} s.")
        except Exception:
            log.exception("%s %s failed; please report this", self.command, self.path.partition("?")[0])
            response = error_response(
                500, "this should not happen; the node's log says where it did. Please report it."
            )
        self._send(response)

    def _respond(self) -> Response:
        if not self._is_for_us():
            return error_response(
                421, "this node listens on loopback only, and answers to names of loopback: 127.0.0.1."
            )
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdecimal()):
            return error_response(411, "send the body in one piece, with its Content-Length.")
        if len(length) > 9 or int(length) > MAX_BODY:
            return error_response(413, f"a body of {length[:20]} bytes: the limit is {MAX_BODY}.")
        try:
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=MAX_FIELDS))
        except ValueError as error:
            return error_response(400, f"the address cannot be read: {error}.")
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        request = Request(
            self.command,
            unquote(url.path),
            query,
            self.headers.get("Accept", ""),
            token.strip() if scheme.lower() == "bearer" else None,
            self.headers.get("Content-Type", ""),
            self.rfile.read(int(length)),
            self.client_address[0],
        )
        return self.server.answer(request)  # type: ignore[attr-defined, no-any-return]

    def _is_for_us(self) -> bool:
        """A page of somebody else's must not reach a loopback port by giving its own name to 127.0.0.1."""
        if not self.server.only_loopback:  # type: ignore[attr-defined]
            return True
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if host in ("", "localhost") or host.endswith(".localhost"):
                return True
            return ipaddress.ip_address(host.split("%")[0]).is_loopback
        except ValueError:  # no address at all
            return False

    def _send(self, response: Response) -> None:
        self.connection.settimeout(REQUEST_TIMEOUT_S)
        self.send_response(response.status)
        for name, value in {**SECURITY, **response.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)
