"""What goes over the wire of an HTTP port: whoever is slow, many, or talks nonsense is refused in one line of JSON with
strict headers, or let go, and disturbs nobody."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sublet_leader.http import server
from sublet_leader.http.auth import RequestGuard
from sublet_leader.http.responses import build_app, json_response
from sublet_leader.http.server import UvicornThread
from sublet_leader.http.settings import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_OF_ADDRESS,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
)
from sublet_leader.listen_address import ListenAddress
from sublet_protocol.domain.secret import Secret
from sublet_protocol.gate.client_address_counts import to_source
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.tls.files import TlsFiles
from tests.integration.http_kit import Answer
from tests.integration.tls_kit import Certificates
from tests.kit import WAIT_S, eventually

TOKEN = "the-token-of-an-admin"
HOST = b"Host: 127.0.0.1\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST
ACT = b"POST /act HTTP/1.1\r\n" + HOST + b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
ACT += b"Content-Type: application/json\r\n"
MANY_BYTES = 30_000_000
HALF = MAX_HEAD_BYTES // 2
GUARD = RequestGuard(AccessGate(), Secret(TOKEN))


class Port:
    """A server with a few routes, some of which wait until they are let on."""

    def __init__(self, tls: TlsFiles | None = None, host: str = "127.0.0.1") -> None:
        self.let_on = threading.Event()
        self.waiting = threading.Semaphore(0)
        routes = [
            Route("/", lambda request: PlainTextResponse("hello")),
            Route("/wait", self._wait),
            Route("/block", self._block),
            Route("/many", lambda request: Response(b"x" * MANY_BYTES)),
            Route("/broken", self._broken),
            Route("/act", GUARD.require_operate(json_response), methods=["POST"]),
            Route("/fail", GUARD.require_operate(lambda body: json_response(body, 500)), methods=["POST"]),
            Route("/known", GUARD.require_known(self._known)),
        ]
        self.server = UvicornThread(ListenAddress(host, 0), build_app(routes), tls)
        self.server.start()

    def connect(self, receive_buffer: int | None = None, source: str = "") -> socket.socket:
        """A connection with which nothing was said. `source`: from which of the machine's addresses."""
        made = socket.socket()
        made.bind((source, 0))
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(WAIT_S)
        made.connect((self.server.address.host, self.server.address.port))
        return made

    def say(self, text: bytes) -> bytes:
        """Send the text; return all bytes of the answer."""
        with closing(self.connect()) as connection:
            with suppress(OSError):  # refused before all of it was taken
                connection.sendall(text)
            return rest(connection)

    async def _wait(self, request: Request) -> Response:
        self.waiting.release()
        while not self.let_on.is_set():
            await asyncio.sleep(0.05)
        return PlainTextResponse("at last")

    async def _known(self, request: Request) -> Response:
        return PlainTextResponse("known")

    def _block(self, request: Request) -> Response:
        self.waiting.release()
        self.let_on.wait()
        return PlainTextResponse("at last")

    def _broken(self, request: Request) -> Response:
        raise AssertionError("a rule of our own")


@pytest.fixture
def port() -> Iterator[Port]:
    found = Port()
    yield found
    found.let_on.set()
    found.server.close()


def rest(connection: socket.socket) -> bytes:
    """Return all bytes until the other side has closed the connection."""
    found = []
    with suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            found.append(piece)
    return b"".join(found)


def parse(text: bytes) -> Answer:
    """Raises AssertionError where it is not exactly one answer, with strict headers."""
    head, _, body = text.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert first.startswith("HTTP/1.1 "), text[:100]
    named = [line.split(": ", 1) for line in lines]
    headers = {name.lower(): value for name, value in named}
    assert len(headers) == len(named), "each header once"
    assert headers["connection"] == "close"
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers
    assert int(headers["content-length"]) == len(body) or body == b""
    return Answer(int(first.split(" ")[1]), headers, body)


def error_of(answer: Answer) -> str:
    """Return the error, which is one line."""
    assert answer.headers["content-type"] == "application/json"
    assert b"\n" not in answer.body
    (error,) = answer.object.values()
    return str(error)


ODD: dict[str, tuple[bytes, int, str]] = {
    "bad percent-encoding": (b"GET /%zz%ff%00 HTTP/1.1\r\n" + HOST + b"\r\n", 404, "there is nothing at /%zz"),
    "an encoded line end": (b"GET /%0d%0aSet-Cookie:%20a=b HTTP/1.1\r\n" + HOST + b"\r\n", 404, "nothing at"),
    "a bare carriage return": (GET + b"X: a\rSet-Cookie: b\r\n\r\n", 400, "header"),
    "a zero byte": (GET + b"X: a\0b\r\n\r\n", 400, "header"),
    "a header without a name": (GET + b": a\r\n\r\n", 400, "header"),
    "a blank before the colon": (GET + b"X : a\r\n\r\n", 400, "header"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
    "two hosts": (GET + HOST + b"\r\n", 400, "Host"),
    "somebody else's host": (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421, "loopback"),
    "a host that begins like ours": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 421, "loopback"),
    "a host without its bracket": (b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", 421, "loopback"),
    "another version": (b"GET / HTTP/9.9\r\n" + HOST + b"\r\n", 505, "but 1.1"),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not HTTP"),
    "a method of no kind": (b"G(T / HTTP/1.1\r\n" + HOST + b"\r\n", 400, "not HTTP"),
    "a length that is none": (ACT + b"Content-Length: -1\r\n\r\n", 400, "Content-Length"),
    "two lengths": (ACT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length"),
    "a large length": (ACT + b"Content-Length: 65537\r\n\r\n", 413, "65536"),
    "a monstrous length": (ACT + b"Content-Length: 9999999999999999999\r\n\r\n", 413, "65536"),
    "a body in pieces": (ACT + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411, "Content-Length"),
    "pieces and a length": (
        ACT + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n",
        411,
        "one piece",
    ),
    "pieces that are none": (ACT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", 400, "chunk"),
    "a long address": (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414, ""),
    "a long address without an end": (b"GET /" + b"x" * 300_000, 414, ""),
    "a large header": (GET + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431, ""),
    "a large header without an end": (GET + b"X: " + b"x" * 300_000, 431, ""),
    "many headers": (GET + b"X: y\r\n" * (MAX_HEAD_BYTES // 2) + b"\r\n", 431, ""),
    "many fields": (b"GET /?" + b"a=1&" * 30 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400, "20 fields"),
    "OPTIONS": (b"OPTIONS / HTTP/1.1\r\n" + HOST + b"\r\n", 405, "use GET, HEAD"),
    "TRACE": (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", 405, "use GET, HEAD"),
    "CONNECT": (b"CONNECT evil.example:80 HTTP/1.1\r\n" + HOST + b"\r\n", 404, "nothing at"),
    "a method of their own": (b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n", 405, "use GET, HEAD"),
    "GET of an action": (b"GET /act HTTP/1.1\r\n" + HOST + b"\r\n", 405, "use POST"),
    "a slash too many": (b"POST /act/ HTTP/1.1\r\n" + HOST + b"\r\n", 404, "nothing at /act/"),
    "no token": (b"POST /act HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}", 401, "Bearer"),
    "another token": (ACT.replace(b"admin", b"nobody") + b"Content-Length: 2\r\n\r\n{}", 401, "Bearer"),
    "a token by another scheme": (ACT.replace(b"Bearer", b"Basic") + b"Content-Length: 2\r\n\r\n{}", 401, "Bearer"),
    "a body that is no JSON": (ACT + b"Content-Length: 2\r\n\r\n{x", 400, "no JSON"),
    "a deep body": (ACT + b"Content-Length: 60000\r\n\r\n" + b"[" * 60000, 400, "no JSON"),
    "a body that is no text": (ACT + b"Content-Length: 2\r\n\r\n\xff\xfe", 400, "no JSON"),
}


def test_odd_requests_are_refused_in_one_line(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    for name, (request, status, error) in ODD.items():
        answered = port.say(request)
        assert answered, name
        reply = parse(answered)
        assert (reply.status, error in error_of(reply)) == (status, True), (name, reply)
        assert "set-cookie" not in reply.headers
        if status == 405:
            assert reply.headers["allow"] in error_of(reply)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1, said
    assert "admin token is missing" in said[0]


def test_one_connection_has_one_answer(port: Port) -> None:
    assert parse(port.say(GET + b"\r\n")).body == b"hello"
    assert parse(port.say((GET + b"\r\n") * 3)).body == b"hello"
    assert parse(port.say(b"GET / HTTP/1.0\r\n\r\n")).body == b"hello"
    assert parse(port.say(GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")).body == b"hello"
    for path, length in ((b"/", "5"), (b"/none", None)):
        asked = b"%s " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n"
        head, full = parse(port.say(asked % b"HEAD")), parse(port.say(asked % b"GET"))
        assert (head.status, head.body) == (full.status, b"")
        assert {**head.headers, "date": ""} == {**full.headers, "date": ""}
        assert length is None or head.headers["content-length"] == length
    assert parse(port.say(ACT + b'Content-Length: 9\r\n\r\n{"a":"b"}')).body == b'{"a":"b"}'
    assert parse(port.say(b"GET /known HTTP/1.1\r\n" + HOST + b"\r\n")).body == b"known"


def test_what_is_as_large_as_may_be_is_answered(port: Port) -> None:
    text = b'{"a":"%s"}' % (b"x" * (MAX_BODY_BYTES - 8))
    assert parse(port.say(ACT + b"Content-Length: %d\r\n\r\n" % len(text) + text)).body == text
    assert parse(port.say(ACT + b"Content-Length: 000000002\r\n\r\n{}")).body == b"{}"
    for count, status in ((MAX_FIELDS, 200), (MAX_FIELDS + 1, 400)):
        query = b"&".join([b"a=1"] * count)
        assert parse(port.say(b"GET /?" + query + b" HTTP/1.1\r\n" + HOST + b"\r\n")).status == status


@pytest.mark.parametrize(("target", "status"), [(HALF, 431), (HALF + 1, 414)])
def test_a_head_has_a_limit_of_its_own(port: Port, target: int, status: int) -> None:
    """Of what is too long it names the half that has more of it."""

    def ask(size: int) -> int:
        path, more = b"/?" + b"x" * (target - 1), size - target - len(b"Host127.0.0.1X")
        return parse(port.say(b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"X: " + b"x" * more + b"\r\n\r\n")).status

    assert (ask(MAX_HEAD_BYTES), ask(MAX_HEAD_BYTES + 1)) == (200, status)


def test_whoever_shuts_down_sending_is_answered(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    for request, said in ((GET + b"\r\n", "hello"), (ACT + b"Content-Length: 2\r\n\r\n{}", "{}")):
        with closing(port.connect()) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            assert parse(rest(connection)).body.decode() == said
    for part in (GET, ACT + b"Content-Length: 2\r\n\r\n{"):
        with closing(port.connect()) as connection:
            connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            assert rest(connection) == b""
    assert [record.getMessage() for record in caplog.records] == []


def test_a_port_beyond_loopback_has_any_name() -> None:
    port = Port(host="0.0.0.0")
    assert parse(port.say(b"GET / HTTP/1.1\r\nHost: node.example\r\n\r\n")).body == b"hello"
    port.server.close()


def test_the_log_has_an_outcome_and_short_values(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sublet_leader")
    for path, length, outcome in ((b"act", 58, "done status=200"), (b"fail", 59, "failed status=500")):
        body = b'{"a":"%s"}' % (b"x" * length)
        port.say(ACT.replace(b"/act", b"/" + path) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda path=path: f"action=/{path.decode()} " in caplog.text, WAIT_S)  # type: ignore[misc]
        assert f"outcome={outcome}: " in caplog.text
    assert "x" * 58 + "'}" in caplog.text
    assert "x" * 59 + "..." in caplog.text


def test_a_header_does_not_say_who_asks(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sublet_leader")
    parse(port.say(ACT + b"X-Forwarded-For: 10.9.8.7\r\nX-Forwarded-Proto: https\r\nContent-Length: 2\r\n\r\n{}"))
    assert "principal=admin_token address=127.0.0.1 " in caplog.text
    assert "10.9.8.7" not in caplog.text


def test_a_fault_of_ours_is_logged_once_and_answered(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    reply = parse(port.say(b"GET /broken HTTP/1.1\r\n" + HOST + b"\r\n"))
    assert (reply.status, "report it" in error_of(reply)) == (500, True)
    (logged,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logged.getMessage() == "HTTP request failed: method=GET path=/broken: please report this"
    assert "a rule of our own" in caplog.text


def trickle(connection: socket.socket, stop: threading.Event) -> None:
    """A byte now and then, for ever."""
    with suppress(OSError):
        while not stop.wait(0.2):
            connection.sendall(b"x")


@pytest.mark.long
def test_who_trickles_a_request_is_let_go(port: Port) -> None:
    stop = threading.Event()
    with ExitStack() as stack:
        stack.callback(stop.set)
        silent, head, body = (stack.enter_context(closing(port.connect())) for _ in range(3))
        head.sendall(GET + b"X: ")
        body.sendall(ACT + b"Content-Length: 60000\r\n\r\n")
        for each in (head, body):
            thread = threading.Thread(target=trickle, args=(each, stop))
            stack.callback(thread.join)
            stack.callback(stop.set)
            thread.start()
        assert (rest(silent), rest(head)) == (b"", b"")
        reply = parse(rest(body))
        assert (reply.status, "took longer than 10 s" in error_of(reply)) == (408, True)
    assert parse(port.say(GET + b"\r\n")).body == b"hello"


@pytest.mark.long
def test_whoever_does_not_take_his_answer_is_let_go(port: Port) -> None:
    with closing(port.connect(receive_buffer=4096)) as connection:
        me = connection.getsockname()

        def held() -> list[Any]:
            return [each for each in psutil.Process().net_connections("tcp") if each.raddr == me]

        connection.sendall(b"GET /many HTTP/1.1\r\n" + HOST + b"\r\n")
        assert connection.recv(4, socket.MSG_PEEK) == b"HTTP"
        assert held()
        eventually(lambda: not held(), WAIT_S)
        assert len(rest(connection)) < MANY_BYTES


def test_one_connection_too_many_is_turned_away(port: Port) -> None:
    with ExitStack() as stack:
        inside = []
        for number in range(MAX_CONNECTIONS):
            source = f"127.0.1.{1 + number // MAX_CONNECTIONS_OF_ADDRESS}"
            connection = stack.enter_context(closing(port.connect(source=source)))
            connection.sendall(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
            inside.append(connection)
        for _ in inside:
            assert port.waiting.acquire(timeout=WAIT_S)
        reply = parse(port.say(GET + b"\r\n"))
        assert (reply.status, f"{MAX_CONNECTIONS} others" in error_of(reply)) == (503, True)
        port.let_on.set()
        for connection in inside:
            assert parse(rest(connection)).body == b"at last"
    assert parse(port.say(GET + b"\r\n")).body == b"hello"


def test_one_address_leaves_connections_for_others(port: Port) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS_OF_ADDRESS):
            connection = stack.enter_context(closing(port.connect()))
            connection.sendall(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
            assert port.waiting.acquire(timeout=WAIT_S)
        reply = parse(port.say(GET + b"\r\n"))
        assert (reply.status, f"{MAX_CONNECTIONS_OF_ADDRESS} connections" in error_of(reply)) == (503, True)
        with closing(port.connect(source="127.0.0.2")) as other:
            other.sendall(GET + b"\r\n")
            assert parse(rest(other)).body == b"hello"
        port.let_on.set()
    eventually(lambda: parse(port.say(GET + b"\r\n")).status == 200, WAIT_S)


def test_handshakes_count_as_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 10 * WAIT_S)  # none of them ends by itself
    made = Certificates(tmp_path / "tls")
    port, context = Port(TlsFiles(*made.write("node", "127.0.0.1"))), ssl.create_default_context(cafile=made.ca)

    def ask(connection: socket.socket) -> bytes:
        with closing(context.wrap_socket(connection, server_hostname="127.0.0.1")) as encrypted:
            encrypted.sendall(GET + b"\r\n")
            return rest(encrypted)

    with ExitStack() as stack:
        stack.callback(port.server.close)
        for _ in range(MAX_CONNECTIONS_OF_ADDRESS):
            stack.enter_context(closing(port.connect()))
        with closing(port.connect()) as beyond:
            assert rest(beyond) == b""
        assert parse(ask(port.connect(source="127.0.0.2"))).body == b"hello"


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_addresses_of_one_network_are_one(one: str, other: str, is_one: bool) -> None:
    assert (to_source(one) == to_source(other)) is is_one


def test_a_port_that_is_closed_waits_for_nobody(port: Port) -> None:
    where = port.server.address
    with closing(port.connect()) as silent, closing(port.connect()) as asking:
        asking.sendall(b"GET /block HTTP/1.1\r\n" + HOST + b"\r\n")
        assert port.waiting.acquire(timeout=WAIT_S)
        assert not where.is_free()
        port.server.close()
        assert rest(silent) == b""
        assert where.is_free()
        port.let_on.set()


PROCESS = """
import socket, threading
from starlette.routing import Route
from sublet_leader.http.responses import build_app
from sublet_leader.http.server import UvicornThread
from sublet_leader.listen_address import ListenAddress

asked = threading.Event()
def block(request):
    asked.set()
    threading.Event().wait()

server = UvicornThread(ListenAddress("127.0.0.1", 0), build_app([Route("/", block)]))
server.start()
connection = socket.create_connection((server.address.host, server.address.port))
connection.sendall(b"GET / HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
assert asked.wait(60)
server.close()
print("closed")
"""


def test_a_process_ends_whatever_is_being_answered() -> None:
    ended = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert (ended.stdout, ended.stderr) == ("closed\n", "")
