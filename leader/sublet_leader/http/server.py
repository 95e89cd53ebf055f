"""Serves HTTP by uvicorn, in a thread and a loop of its own.

It adds bounds that uvicorn lacks. A connection has one request and one answer, and is closed. A client that has not
sent its head in `HEAD_TIMEOUT_S`, or its body, or taken its answer, in `REQUEST_TIMEOUT_S` is disconnected, however
steadily it trickles.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from sublet_leader.http.responses import error_response, make_strict
from sublet_leader.http.settings import (
    CERTIFICATE,
    GRACE_S,
    HEAD_TIMEOUT_S,
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_OF_ADDRESS,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    REQUEST_TIMEOUT_S,
)
from sublet_leader.listen_address import ListenAddress, is_loopback
from sublet_protocol.domain.address import is_loopback_host
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.gate.client_address_counts import ClientAddressCounts
from sublet_protocol.tls.files import TlsFiles
from sublet_protocol.tls.server_context import ReloadingServerContext

log = logging.getLogger(__name__)


class UvicornThread:
    """Serves `app` from `start` to `close`. Raises `InvalidSetting` if it cannot listen there."""

    def __init__(self, listen: ListenAddress, app: ASGIApp, tls: TlsFiles | None = None) -> None:
        encrypted = None if tls is None else ReloadingServerContext.of(tls)
        if not listen.is_free():
            raise InvalidSetting(
                f"cannot listen for HTTP on {listen}: the port is in use, or not this machine's. Give another one: "
                "`sublet leader --http 127.0.0.1:7481`"
            )
        is_ipv6 = ":" in listen.host
        listener = socket.create_server(
            (listen.host, listen.port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
        )
        counts = ClientAddressCounts()
        self._socket = _CountingListener(listener, counts, is_refusing=encrypted is not None)
        self.address = ListenAddress(listen.host, int(self._socket.getsockname()[1]))
        config = uvicorn.Config(
            _Gate(app, is_loopback(listen.host)),
            http=functools.partial(_BoundedProtocol, counts),  # type: ignore[arg-type]  # called as the class is
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # `_Gate` logs what fails here; invalid requests are not logged
            access_log=False,
            proxy_headers=False,  # any client can set these headers
            server_header=False,
            backlog=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=GRACE_S,
        )
        config.load()
        config.ssl = encrypted
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="sublet-http", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections; blocks for up to 1.5 times `GRACE_S`."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(1.5 * GRACE_S)
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_BoundedEventLoop) as runner:
            runner.run(self._server.serve([self._socket]))


class _BoundedEventLoop(asyncio.SelectorEventLoop):
    """An event loop that bounds a TLS handshake by `HEAD_TIMEOUT_S`."""

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        """Listen as asyncio does, with that bound."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HEAD_TIMEOUT_S
        return await super().create_server(*arguments, **options)


def _find_exceeded_limit(counts: ClientAddressCounts, host: str) -> str | None:
    """Return the limit that a connection from `host`, which is counted already, exceeds; None if there is none.
    Connections count from when they are accepted."""
    if counts.total() > MAX_CONNECTIONS:
        return f"{MAX_CONNECTIONS} others are connected, which is the limit. Try again."
    if counts.count_from(host) > MAX_CONNECTIONS_OF_ADDRESS:
        return f"{MAX_CONNECTIONS_OF_ADDRESS} connections are from this address, which is the limit. Try again."
    return None


class _CountingListener(socket.socket):
    """Counts the connections that it accepts. `is_refusing`: closes those beyond the limits, before any other work."""

    def __init__(self, listener: socket.socket, counts: ClientAddressCounts, *, is_refusing: bool) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._counts, self._is_refusing = counts, is_refusing

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept and return the next connection to serve."""
        while True:
            accepted, address = super().accept()
            connection = _CountedConnection(accepted, self._counts, address[0])
            if not self._is_refusing or _find_exceeded_limit(self._counts, address[0]) is None:
                return connection, address
            connection.close()


class _CountedConnection(socket.socket):
    """A connection that counts until it is closed."""

    def __init__(self, accepted: socket.socket, counts: ClientAddressCounts, host: str) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._counts, self._host, self._is_counted = counts, host, True
        counts.add(host)

    def close(self) -> None:
        """Close and stop counting it; a second call changes nothing."""
        super().close()
        if self._is_counted:
            self._is_counted = False
            self._counts.remove(self._host)


class _BoundedProtocol(H11Protocol):
    """One connection: bounds the number of connections, and the time of its head and its answer."""

    def __init__(self, counts: ClientAddressCounts, **options: Any) -> None:
        super().__init__(**options)
        self._counts = counts

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        encrypted: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        certificate = None if encrypted is None else encrypted.getpeercert(binary_form=True)
        self.app_state = {**self.app_state, CERTIFICATE: certificate}  # each request's `state`
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._end_without_request)
        if (limit := _find_exceeded_limit(self._counts, transport.get_extra_info("peername")[0])) is not None:
            self._refuse(503, limit)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open: if a complete request was sent and there is no TLS, as the
        client may have closed its half only."""
        is_encrypted = self.transport.get_extra_info("sslcontext") is not None  # TLS cannot be closed by half
        return not is_encrypted and bool(self.cycle) and not self.cycle.more_body

    def on_response_complete(self) -> None:
        """Set the deadline by which the client must have taken the written answer."""
        super().on_response_complete()
        self._restart_deadline()

    def send_400_response(self, msg: str) -> None:
        """Reject what h11 cannot parse as HTTP."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if status == 431 and b"\n" not in self.conn.trailing_data[0]:
            status = 414
        if self.cycle:
            self.cycle.disconnected = True  # what it would answer comes too late
        self._refuse(status, f"this is not HTTP as it should be: {error}.")

    def _end_without_request(self) -> None:
        if not self.cycle:
            self.transport.abort()

    def _refuse(self, status: int, error: str) -> None:
        answer = error_response(status, error)
        make_strict(answer.headers)
        events = (
            h11.Response(status_code=status, headers=answer.raw_headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
        self._restart_deadline()

    def _restart_deadline(self) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)


class _Gate:
    """Rejects requests that are for other hosts or out of bounds, and adds the strict headers to answers."""

    def __init__(self, app: ASGIApp, only_loopback: bool) -> None:
        self._app, self._only_loopback = app, only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_strictly(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": list(message["headers"])}
                make_strict(MutableHeaders(scope=message))
            await send(message)

        try:
            await (self._find_refusal(scope) or self._app)(scope, receive, send_strictly)
        except Exception:
            log.exception("HTTP request failed: method=%s path=%s: please report this", scope["method"], scope["path"])

    def _find_refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        target = len(scope["raw_path"]) + len(scope["query_string"])
        if target + sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD_BYTES:
            return error_response(
                414 if target > MAX_HEAD_BYTES / 2 else 431, f"a request's head has {MAX_HEAD_BYTES} bytes at most."
            )
        if self._only_loopback and not _is_loopback_name(headers.get("Host", "")):
            return error_response(
                421, "this node listens on loopback only, and answers to names of loopback: 127.0.0.1."
            )
        if not scope["http_version"].startswith("1."):
            return error_response(505, f"HTTP {scope['http_version']} is not spoken here, but 1.1.")
        length = headers.get("Content-Length", "0")
        if "Transfer-Encoding" in headers:
            return error_response(411, "send the body in one piece, with its Content-Length.")
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            return error_response(413, f"a body of {length[:20]} bytes: the limit is {MAX_BODY_BYTES}.")
        if scope["query_string"].count(b"&") >= MAX_FIELDS:
            return error_response(400, f"the address cannot be read: a query has {MAX_FIELDS} fields at most.")
        return None


def _is_loopback_name(host: str) -> bool:
    """Return whether it is a loopback name: another site's page must not reach a loopback port by resolving its own
    name to 127.0.0.1."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # no address at all
        return False
    return name == "" or name.endswith(".localhost") or is_loopback_host(name)
