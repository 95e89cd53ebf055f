"""Certificates, tokens and the database's password are replaced while everything is at work, and no call fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from sublet import Feed, Publisher, Session
from sublet_borrower.node_client import node_calls
from sublet_protocol.domain.access.rights import AccessRule, AccessRules, AccessSnapshot, Right, ValidToken
from sublet_protocol.domain.access.token import NewToken
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.access_cache import AccessCache
from sublet_protocol.gate.client_access_token import load_access_token
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.gate.interceptor import GateInterceptor
from sublet_protocol.messages.agent_secret import AgentSecret
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_connection import NodeConnection
from sublet_protocol.pubsub.server import SERVER_OPTIONS, PubSubServer, make_node_side_machine
from sublet_protocol.tls.channel import open_channel
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.access_tokens import list_tokens, revoke_token
from tests.integration.access_kit import allow, bearer, rule, token_of
from tests.integration.cli_kit import Running, Shell, a_shell, done
from tests.integration.session_kit import event, until
from tests.integration.tls_kit import HOST, Certificates, shown
from tests.kit import Background, eventually, in_loop

pytestmark = pytest.mark.conforms("X8")

GROUP = "$share/g/t/#"
WAIT_S = 120.0
ROTATIONS = 3


class Exchange:
    """What is published one by one, and what a session has received of it."""

    def __init__(self, publisher: Any, session: Session) -> None:
        self._publisher, self._session = publisher, session
        self._sent: list[bytes] = []
        self._received: set[bytes] = set()

    def publish(self) -> None:
        value = str(len(self._sent)).encode()
        self._publisher.publish("t/1", value).result(WAIT_S)
        self._sent.append(value)

    def consume(self) -> None:
        if (batch := self._session.poll(1.0)) is not None:
            self._received.update(batch.table.column("value").to_pylist())
            batch.ack()

    def has_all(self) -> bool:
        """Consume, and return whether all messages sent have arrived."""
        self.consume()
        return self._received >= set(self._sent)


@contextmanager
def at_work(*steps: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Have each step done again and again; yield what waits until each has been done some more."""
    with ExitStack() as stack:
        users = [stack.enter_context(Background(step)) for step in steps]

        def go_on() -> None:
            for user in users:
                user.more(3)

        yield go_on


class TokenFile:
    """What a client reads its token from."""

    def __init__(self, path: Path, conn: psycopg.Connection[Any]) -> None:
        self.path, self._conn, self.token = path, conn, token_of(conn, "user:a")
        self._write()

    def replace(self, address: str) -> None:
        """Replace the token as docs/access.md describes: the new one is in use before the old one is revoked."""
        old, self.token = self.token, token_of(self._conn, "user:a")
        assert is_known(address, self.token), "it counts at once"
        self._write()
        eventually(self._is_in_use, WAIT_S)
        revoke_token(self._conn, old[4:12])
        eventually(lambda: not is_known(address, old), WAIT_S)

    def _write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(self.token)
        fresh.chmod(0o600)
        os.replace(fresh, self.path)

    def _is_in_use(self) -> bool:
        return any(each.token_id == self.token[4:12] and each.last_used for each in list_tokens(self._conn))


def is_known(address: str, token: str) -> bool:
    with closing(open_channel(address, ())) as channel:
        call = sublet_pb2_grpc.FeedStub(channel).Heads.future(
            pb.HeadsRequest(protocol_version=PROTOCOL_VERSION), metadata=bearer(token)
        )
        return call.code() is grpc.StatusCode.OK


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        for right in (Right.PUBLISH, Right.READ, Right.JOIN):
            allow(connection, rule("user:a", right, "t/#"))
        yield connection


@pytest.fixture
def tokens(conn: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenFile:
    monkeypatch.setenv("SUBLET_TOKEN_FILE", str(tmp_path / "token"))
    return TokenFile(tmp_path / "token", conn)


@pytest.fixture
def node(shell: Shell, trusted: Certificates, tokens: TokenFile) -> Running:
    certificate, key = trusted.write("node", HOST)
    return shell.leader("n1", "--tls-cert", certificate, "--tls-key", key)


class Calls(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Notes which calls of a feed's clients fail, also those that are tried again."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def open_channel(self, address: str, options: Any) -> Any:
        return grpc.intercept_channel(open_channel(address, options), self)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = continuation(details, request)
        call.add_done_callback(self._note)
        return call

    intercept_unary_stream = intercept_unary_unary

    def _note(self, call: Any) -> None:
        if call.code() is not grpc.StatusCode.OK and "Locally cancelled" not in call.details():  # by one that leaves
            self.failed.append(f"{call.code()}: {call.details()}")


@pytest.mark.long
def test_rotation_drops_no_call(
    node: Running,
    trusted: Certificates,
    tokens: TokenFile,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One client publishes, one session consumes, and newcomers make a connection for each call."""
    calls = Calls()
    monkeypatch.setattr(node_calls, "open_channel", calls.open_channel)
    with (
        Feed([node.address]) as feed,
        Session(GROUP, nodes=[node.address], transport="nodes", name="s", starting_position="earliest") as session,
    ):
        exchange = Exchange(feed, session)

        def come_anew() -> None:
            with Feed([node.address]) as newcomer:
                newcomer.publish("t/2", b"new").result(WAIT_S)
                newcomer.history("t/none")

        with at_work(exchange.publish, exchange.consume, come_anew) as go_on:
            go_on()
            for _ in range(ROTATIONS):
                before = shown(node.address)
                trusted.write("node", HOST)
                tokens.replace(node.address)
                eventually(lambda before=before: shown(node.address) != before, WAIT_S)  # type: ignore[misc]
                go_on()
        eventually(exchange.has_all, WAIT_S)
        (counters,) = session.connections.values()
        assert not sum(counters.connections_lost.values())
        assert calls.failed == []
    revoked = conn.execute("select count(*) from token where revoked_at is not null").fetchone()
    assert revoked == (ROTATIONS,)


@pytest.mark.long
def test_a_reader_goes_on_with_the_new_token(node: Running, tokens: TokenFile) -> None:
    """Its call lives longer than the token that it began with."""
    with Feed([node.address]) as feed, feed.follow("t/#", "earliest") as reader:
        for number in range(ROTATIONS):
            feed.publish("t/1", b"%d" % number).result(WAIT_S)
            table = reader.read(WAIT_S)
            assert table is not None
            assert table.column("value").to_pylist() == [b"%d" % number]
            tokens.replace(node.address)


class SlowRefusal(AccessCache):
    """Refuses a token only when its bearer's file has another one."""

    def __init__(self, file: Path, old: NewToken, new: NewToken) -> None:
        valid = {new.token_id: ValidToken(new.digest, "user:a", 1e6)}
        rules = [AccessRule("user:a", right, TopicFilter("#")) for right in (Right.JOIN, Right.WATCH)]
        super().__init__(AccessSnapshot("1", AccessRules(rules), valid), time.monotonic)
        self._file, self._old, self._new = file, old.token.reveal(), new.token.reveal()
        self.refused = 0

    def authenticate(self, token: str) -> str | None:
        if token == self._old:
            self._file.write_text(self._new)
            self.refused += 1
        return super().authenticate(token)


@in_loop
async def test_a_connection_outlives_a_token_refused_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls that were under way with it, the next attempt has the new one."""
    old, new, file = NewToken.draw(), NewToken.draw(), tmp_path / "token"
    file.write_text(old.token.reveal())
    file.chmod(0o600)
    monkeypatch.setenv("SUBLET_TOKEN_FILE", str(file))
    cache = SlowRefusal(file, old, new)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(GateInterceptor(AccessGate(cache)),))
    sessions = PubSubServer(make_node_side_machine("n1"), lambda subscriber_id, message: None)
    sessions.register(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    seen: list[object] = []
    lost: list[object] = []
    connection = NodeConnection(address, AgentSecret("a"), seen.append, lost.append, token=load_access_token())
    try:
        connection.subscribe(Channel.GROUP, None)
        await until(lambda: sessions.publish(Channel.GROUP, "$share/g/#", event(1)) > 0)
        await until(lambda: len(seen) > 0)
        assert (cache.refused > 0, lost) == (True, [])
    finally:
        await connection.close(timeout_s=0)
        await sessions.close()
        await server.stop(0)


FIRST = "first-password"
CONNECTED = "select pid, application_name from pg_stat_activity where usename = 'app'"


@pytest.fixture
def superuser(server_home: Path) -> Iterator[psycopg.Connection[Any]]:
    """Yield the superuser of a server that requires the password of the user `app`."""
    with EmbeddedPostgres(server_home / "data") as server:
        migrate(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"create role app superuser login password '{FIRST}'")
            ((path,),) = connection.execute("show hba_file").fetchall()
            rules = Path(path).read_text()
            Path(path).write_text(f"local all app scram-sha-256\n{rules}")
            connection.execute("select pg_reload_conf()")
            eventually(lambda: not is_let_in(server.url, ""), WAIT_S)
            yield connection


def url_of(server_url: str, password: str) -> str:
    return server_url.replace("postgres@", f"app:{password}@" if password else "app@", 1)


def is_let_in(server_url: str, password: str) -> bool:
    try:
        psycopg.connect(url_of(server_url, password)).close()
    except psycopg.OperationalError:
        return False
    return True


class Given:
    """Holds the password in the file with the database's URL, or in libpq's own."""

    def __init__(self, kind: str, path: Path, server_url: str) -> None:
        self._kind, self._path, self._url = kind, path, server_url
        if kind == "SUBLET_DATABASE_URL_FILE":
            self.settings = {kind: str(path)}
        else:
            self.settings = {kind: str(path), "SUBLET_DATABASE_URL": url_of(server_url, "")}

    def write(self, password: str) -> None:
        fresh = self._path.with_suffix(".new")
        is_url = self._kind == "SUBLET_DATABASE_URL_FILE"
        fresh.write_text(url_of(self._url, password) if is_url else f"*:*:*:*:{password}\n")
        fresh.chmod(0o600)
        os.replace(fresh, self._path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["SUBLET_DATABASE_URL_FILE", "PGPASSFILE"])
def test_a_new_password_drops_no_call(
    kind: str, superuser: psycopg.Connection[Any], server_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/deploy.md has it: it is written into the file, then changed in Postgres. Then connections are ended."""
    server_url = EmbeddedPostgres(server_home / "data").url
    given = Given(kind, tmp_path / "secret", server_url)
    given.write(FIRST)
    for name, value in given.settings.items():
        monkeypatch.setenv(name, value)
    with (
        a_shell(**given.settings) as shell,
        Publisher() as publisher,
        Session(GROUP, starting_position="earliest") as session,
    ):
        node = shell.leader("n1")

        exchange = Exchange(publisher, session)
        with at_work(exchange.publish, exchange.consume) as go_on:
            go_on()
            for password in ("second-password", "third-password"):
                before: dict[int, str] = dict(superuser.execute(CONNECTED).fetchall())
                given.write(password)
                superuser.execute(f"alter role app password '{password}'")
                superuser.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")
                assert is_let_in(server_url, password)

                def is_back(before: dict[int, str] = before) -> bool:
                    now: dict[int, str] = dict(superuser.execute(CONNECTED).fetchall())
                    return set(now.values()) >= set(before.values()) and not before.keys() & now.keys()

                eventually(is_back, WAIT_S, lambda: f"{superuser.execute(CONNECTED).fetchall()} {node.err}")
                go_on()
        eventually(exchange.has_all, WAIT_S)
        assert not is_let_in(server_url, FIRST)
        assert done(shell.run("groups", "list", "--json"))
