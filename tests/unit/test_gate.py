"""The gate: who is let in, what a node's memory decides, and for how long."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shlex
import threading
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import Context
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pyarrow as pa
import pytest

from sublet_leader.feed import member_fetch
from sublet_leader.feed.member_fetch import StreamRights
from sublet_leader.feed.publish import FeedPublishWriter, check_topics, make_producer_id
from sublet_protocol.domain.access.rights import AccessRule, AccessRules, AccessSnapshot, Right, ValidToken
from sublet_protocol.domain.access.token import NewToken
from sublet_protocol.domain.errors import PermissionDenied, Unauthenticated, Unavailable
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate import gate as gate_module
from sublet_protocol.gate.access_cache import MAX_AGE_S, AccessCache
from sublet_protocol.gate.audit import AUDIT, REFUSAL_INTERVAL_S, RefusalLog
from sublet_protocol.gate.bounded_request_parser import parse_request
from sublet_protocol.gate.gate import AccessGate, Caller
from sublet_protocol.gate.interceptor import GateInterceptor
from sublet_protocol.messages.feed_messages import FeedPublishRequest
from sublet_protocol.messages.member_reads import FetchRequest
from tests.integration.feed_kit import batch
from tests.kit import WAIT_S, eventually

ORDERS = TopicFilter("orders/#")
NEW = NewToken.draw()
TOKEN = NEW.token.reveal()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def snapshot(*rules: AccessRule, remaining_s: float = 10_000.0, version: str = "1") -> AccessSnapshot:
    return AccessSnapshot(version, AccessRules(rules), {NEW.token_id: ValidToken(NEW.digest, "user:etl", remaining_s)})


PUBLISHES = AccessRule("user:etl", Right.PUBLISH, ORDERS)
BEARER = ("authorization", f"Bearer {TOKEN}")


def make_gate(*rules: AccessRule, clock: Clock | None = None, remaining_s: float = 10_000.0) -> AccessGate:
    return AccessGate(AccessCache(snapshot(*rules, remaining_s=remaining_s), clock or Clock()))


def identify(gate: AccessGate, method: str = "Publish") -> Caller:
    """The bearer of the token."""
    return gate.identify(BEARER[1], "", method)


def test_the_bearer_of_a_token_is_its_principal() -> None:
    gate = make_gate(PUBLISHES)
    for scheme in ("Bearer", "bearer"):
        caller = gate.identify(f"{scheme} {TOKEN}", "ipv4:127.0.0.1:1", "Publish")
        assert caller.principal == "user:etl"
        caller.check(Right.PUBLISH, TopicFilter("orders/eu"))
        assert TOKEN not in repr(caller)


@pytest.mark.conforms("X4")
def test_so_many_refused_tokens_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one takes the place of all: each of them is looked up once more."""
    monkeypatch.setattr(gate_module, "MAX_REFUSED", 2)
    readings = 0

    def read_anew() -> Future[bool]:
        nonlocal readings
        readings += 1
        (reading := Future[bool]()).set_result(True)
        return reading

    gate = AccessGate(AccessCache(snapshot(), Clock()), read_anew)
    first, second, third = (NewToken.draw().token.reveal() for _ in range(3))
    for token, expected in ((first, 1), (second, 2), (first, 2), (second, 2), (third, 3), (third, 3), (first, 4)):
        assert not asyncio.run(gate.read_unknown(f"Bearer {token}"))
        assert readings == expected


@pytest.mark.parametrize("result", [None, False, True])
def test_a_token_is_read_again_unless_it_was_missing(monkeypatch: pytest.MonkeyPatch, result: bool | None) -> None:
    """The tokens could not be read, or not in time, and its bearer is to wait; or it was there, and is gone now."""
    monkeypatch.setattr(gate_module, "READ_TIMEOUT_S", 0.01)
    cache, readings = AccessCache(AccessSnapshot("1", AccessRules(), {}), Clock()), list[Future[bool]]()

    def read_anew() -> Future[bool]:
        readings.append(Future())
        if result is not None:
            cache.replace(snapshot() if result else AccessSnapshot("1", AccessRules(), {}))
            readings[-1].set_result(result)
        return readings[-1]

    gate = AccessGate(cache, read_anew)
    expected = "reply" if result else grpc.StatusCode.UNAVAILABLE
    for number in (1, 2):
        assert call(gate, "/sublet.v1.Session/Poll", _answers, BEARER) == expected
        assert len(readings) == number
        cache.replace(AccessSnapshot("2", AccessRules(), {}))


def test_an_unknown_caller_too_many_comes_again() -> None:
    gate = AccessGate(AccessCache(AccessSnapshot("1", AccessRules(), {}), Clock()), lambda: None)
    assert call(gate, "/sublet.v1.Session/Poll", _answers, BEARER) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "sent", [None, "", "Bearer", "Bearer ", "{0}", "Basic {0}", "Bearer {0}x", "Bearer {1}", "Bearer \xe9"]
)
def test_without_a_token_nobody_is_let_in(sent: str | None) -> None:
    header = None if sent is None else sent.format(TOKEN, TOKEN[:-1])
    with pytest.raises(Unauthenticated, match="SUBLET_TOKEN"):
        make_gate(PUBLISHES).identify(header, "", "Publish")


def test_a_token_expires_by_the_nodes_clock() -> None:
    """A call under way, and a batch that is stored only now, as it has waited for a connection to the database."""
    clock = Clock()
    gate = make_gate(PUBLISHES, clock=clock, remaining_s=5.0)
    caller, messages = identify(gate), pa.RecordBatch.from_pydict({"topic": ["orders/eu"]})
    clock.now += 4.9
    caller.check(Right.PUBLISH, ORDERS)
    check_topics(caller, messages)
    clock.now += 0.1
    with pytest.raises(Unauthenticated):
        caller.check(Right.PUBLISH, ORDERS)
    with pytest.raises(Unauthenticated):
        check_topics(caller, messages)
    with pytest.raises(Unauthenticated):
        identify(gate)


def test_a_call_under_way_loses_what_is_revoked() -> None:
    cache = AccessCache(snapshot(PUBLISHES), Clock())
    caller = identify(AccessGate(cache))
    cache.replace(snapshot(version="2"))
    with pytest.raises(PermissionDenied, match="sublet access allow user:etl publish 'orders/#'"):
        caller.check(Right.PUBLISH, ORDERS)
    cache.replace(AccessSnapshot("3", AccessRules([PUBLISHES]), {}))
    with pytest.raises(Unauthenticated):
        caller.check(Right.PUBLISH, ORDERS)


def test_the_command_that_gives_a_right_is_quoted() -> None:
    """Whoever copies it runs nothing that a certificate's name, a filter or a group says."""
    member = make_gate().make_caller("spiffe://a/$(id)", "")
    assert "sublet access allow 'spiffe://a/$(id)' join" in str(member.denied_error(Right.JOIN, ORDERS, "billing"))
    refusal = str(member.denied_error(Right.JOIN, TopicFilter("a';id;'b"), "x;id>&2 "))
    command = refusal[refusal.index("`") + 1 : refusal.rindex("`")]
    assert shlex.split(command)[4:] == ["join", "a';id;'b", "--group", "x;id>&2 "]
    assert shlex.quote("a';id;'b") in command
    assert "sublet access" not in str(member.denied_error(Right.JOIN, ORDERS, "team-*")), "a rule for others, too"
    everywhere = str(member.denied_error(Right.JOIN, ORDERS))
    assert ("in all groups: no rule" in everywhere, "--group" in everywhere) == (True, False)
    assert "group" not in str(member.denied_error(Right.PUBLISH, ORDERS, "billing"))


def test_old_rights_allow_nothing() -> None:
    clock = Clock()
    cache = AccessCache(snapshot(PUBLISHES), clock)
    caller = identify(AccessGate(cache))
    clock.now += MAX_AGE_S
    caller.check(Right.PUBLISH, ORDERS)
    clock.now += 0.1
    with pytest.raises(Unavailable, match="has not been able to read the rights for 60 s"):
        caller.check(Right.PUBLISH, ORDERS)
    assert caller.may_somewhere(Right.PUBLISH)
    assert cache.authenticate(TOKEN) == "user:etl", "what is granted is read and reported on"
    cache.confirm()
    caller.check(Right.PUBLISH, ORDERS)


def test_rules_for_anybody_are_for_who_is_known() -> None:
    cache = AccessCache(snapshot(AccessRule("*", Right.READ, ORDERS)), Clock())
    for principal, may in (("user:a", True), (None, False)):
        caller = Caller(principal, "", "Read", cache, RefusalLog())
        assert (caller.may(Right.READ, ORDERS), caller.may_somewhere(Right.READ)) == (may, may)


def test_who_has_a_right_on_nothing_is_refused() -> None:
    """Before its request is read; unless the rights are too old to say, or nobody authenticates."""
    clock = Clock()
    caller = identify(make_gate(PUBLISHES, clock=clock))
    caller.check_somewhere(Right.PUBLISH)
    with pytest.raises(PermissionDenied, match=r"no right to read on anything: no rule .* user:etl read FILTER"):
        caller.check_somewhere(Right.READ)
    clock.now += MAX_AGE_S + 1
    caller.check_somewhere(Right.READ)
    AccessGate().identify(None, "", "Publish").check_somewhere(Right.READ)


def test_streams_of_who_may_join_nothing() -> None:
    """None is read, and the database is not asked; without authentication all are, of whatever group."""
    rights, no_database = StreamRights(), cast(Any, None)
    reader, member = (identify(make_gate(AccessRule("user:etl", right, ORDERS))) for right in (Right.READ, Right.JOIN))
    assert rights.filter(no_database, AccessGate().get_caller(), [1, 2]) == [1, 2]
    assert (rights.filter(no_database, reader, [1]), rights.filter(no_database, member, [])) == ((), ())
    request = FetchRequest(1, 0, ORDERS, 1, 1, 1)
    rights.check(no_database, AccessGate().get_caller(), request)
    with pytest.raises(PermissionDenied, match="no right to join 'orders/#'"):
        rights.check(no_database, reader, request)


@pytest.mark.parametrize(
    ("past_s", "group", "may_join", "requested", "expected"),
    [
        (1.9, "gone", "billing", "orders/#", "stored"),
        (2.0, "billing", "billing", "orders/eu", "read"),
        (2.0, "gone", "billing", "orders/#", "refused"),
        (1.9, "billing", "audit", "orders/#", "refused"),
        (1.9, "billing", "billing", "#", "refused"),
    ],
    ids=["not asked again so soon", "asked again", "deleted", "may join others only", "beyond its filter"],
)
def test_for_how_long_a_group_reads_a_stream(
    monkeypatch: pytest.MonkeyPatch, past_s: float, group: str, may_join: str, requested: str, expected: str
) -> None:
    """What is stored says that the group reads the stream, never that its members still may."""
    clock, readings = Clock(), 0
    rows = [(7, "billing", ORDERS)]

    def read_groups(conn: object, stream_ids: object) -> list[tuple[int, str, TopicFilter]]:
        nonlocal readings
        readings += 1
        return rows

    monkeypatch.setattr(member_fetch, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(member_fetch, "read_groups_of_streams", read_groups)
    monkeypatch.setattr(
        member_fetch, "find_streams_of_groups", lambda conn, stream_ids, _: dict.fromkeys(stream_ids, 7)
    )
    cache = AccessCache(snapshot(AccessRule("user:etl", Right.JOIN, ORDERS, "billing")), clock)
    member, rights, no_database = identify(AccessGate(cache)), StreamRights(), cast(Any, None)
    assert rights.filter(no_database, member, [1]) == [1]
    clock.now, readings = clock.now + past_s, 0
    rows[:] = [row for row in rows if row[1] == group]
    cache.replace(snapshot(AccessRule("user:etl", Right.JOIN, TopicFilter("#"), may_join), version="2"))
    found = rights.filter(no_database, member, [1], TopicFilter(requested))
    assert (list(found), readings) == ([] if expected == "refused" else [1], 0 if expected == "stored" else 1)


@pytest.mark.conforms("X5")
def test_a_slash_makes_no_producer_anothers() -> None:
    def named(principal: str | None, name: str) -> str:
        return make_producer_id(Caller(principal, "", "Publish", None, RefusalLog()), name)

    assert named("user:a", "b/p") == "feed/user:a/b/p" != named("user:a/b", "p") != named("user:a%2Fb", "p")
    assert named(None, "p") == "feed/p"


def test_without_authentication_all_is_allowed() -> None:
    """A gate that is on has no caller by itself."""
    caller = AccessGate().identify(None, "", "Publish")
    for right in Right:
        caller.check(right)
        assert caller.may_somewhere(right)
    assert AccessGate().get_caller().principal is None
    with pytest.raises(LookupError):
        Context().run(make_gate().get_caller)


def test_refusals_are_written_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RefusalLog(clock)
    with caplog.at_level(logging.INFO, logger=AUDIT):
        for _ in range(5):
            refusals.record("user:a", "here", "Publish", "publish a/b")
        refusals.record("user:b", "here", "Publish", "publish a/b")
        clock.now += REFUSAL_INTERVAL_S
        refusals.record("user:a", "there", "Read", "x" * 1000)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    counts = [(line["principal"], line["address"], line.get("count", 1)) for line in lines]
    assert counts == [("user:a", "here", 1), ("user:b", "here", 1), ("user:a", "there", 5)]
    assert set(lines[0]) == {"at", "principal", "address", "action", "object", "outcome"}
    assert len(lines[2]["object"]) == 300


def test_a_known_principal_ends_no_others_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sublet_protocol.gate.audit.MAX_PRINCIPALS", 2)
    clock = Clock()
    refusals = RefusalLog(clock)
    with caplog.at_level(logging.INFO, logger=AUDIT):
        for principal, after_s in (("a", 0), ("b", 1), ("b", 0), ("a", 0), ("b", REFUSAL_INTERVAL_S), ("c", 0)):
            clock.now += after_s
            refusals.record(principal, "here", "Publish", "publish a/b")
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [(line["principal"], line.get("count", 1)) for line in lines] == [*(("a", 1), ("b", 1), ("b", 2), ("c", 1))]


def test_a_refusal_is_audited_without_the_token(caplog: pytest.LogCaptureFixture) -> None:
    gate = make_gate()
    with caplog.at_level(logging.INFO, logger=AUDIT):
        caller = gate.identify(f"Bearer {TOKEN}", "here", "Publish")
        with pytest.raises(PermissionDenied):
            caller.check(Right.JOIN, ORDERS, "billing")
        with pytest.raises(Unauthenticated):
            gate.identify(f"Bearer {TOKEN}x", "there", "Publish")
    objects = [json.loads(record.getMessage())["object"] for record in caplog.records]
    assert objects == ["join orders/# in group 'billing'", "unknown caller"]
    assert TOKEN not in caplog.text


@pytest.mark.conforms("X4")
def test_a_principals_batches_are_checked_in_turn() -> None:
    """Each check needs the interpreter, and several at a time would delay all other calls the more. Others' batches do
    not wait for it."""
    begun, over = list[str](), threading.Event()

    class Slow(AccessCache):
        def find_rule(self, principal: str, *_: Any) -> None:
            begun.append(principal)
            assert over.wait(WAIT_S)

    cache, writer = Slow(snapshot(), Clock()), FeedPublishWriter()
    request = FeedPublishRequest("p", 1, 1, batch({"topic": "orders/eu"}))

    def publish(principal: str) -> None:
        with pytest.raises(PermissionDenied):
            writer.store(cast(Any, None), request, Caller(principal, "", "Publish", cache, RefusalLog()))

    with ThreadPoolExecutor() as threads:
        try:
            works = [threads.submit(publish, name) for name in ("user:a", "user:a", "user:b", "user:c", "user:d")]
            eventually(lambda: len(set(begun)) > 1, WAIT_S)
            wait(works[:2], timeout=0.2)
            assert begun.count("user:a") <= 1
        finally:
            over.set()
        for work in works:
            work.result(WAIT_S)
    assert begun.count("user:a") == 2


class _Context:
    """What a call passes to its interceptor, and what that answers."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise RuntimeError(code, text)


def call(gate: AccessGate, method: str, answer: Any, *metadata: tuple[str, str]) -> Any:
    """The reply, or the code."""

    async def run() -> Any:
        async def found(details: object) -> Any:
            return None if answer is None else grpc.unary_unary_rpc_method_handler(answer, bytes)

        details = SimpleNamespace(method=method, invocation_metadata=metadata)
        handler = await GateInterceptor(gate).intercept_service(found, details)
        if handler is None:
            return None
        try:
            if handler.unary_unary is not None:
                return await handler.unary_unary(b"", _Context(*metadata))
            return await handler.stream_unary(_one_request(), _Context(*metadata))
        except RuntimeError as error:
            return error.args[0]

    return asyncio.run(run())


def test_a_call_cancelled_in_line_leaves_nothing() -> None:
    """As a coroutine that nobody awaits, of which Python warns."""
    cancelled = 0

    async def run() -> None:
        async def found(details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(_answers, bytes)

        async def cancel_after(rounds: int) -> int:
            calls = [asyncio.ensure_future(handler.stream_unary(_one_request(), _Context(BEARER))) for _ in range(9)]
            for _ in range(rounds):
                await asyncio.sleep(0)
            for each in calls:
                each.cancel()
            return (await asyncio.gather(*calls, return_exceptions=True)).count("reply")

        nonlocal cancelled
        gate = make_gate(PUBLISHES)
        details = SimpleNamespace(method="/sublet.v1.Session/Poll", invocation_metadata=(BEARER,))
        handler = await GateInterceptor(gate).intercept_service(found, details)
        rounds = 0
        while (answered := await cancel_after(rounds)) < 9:
            cancelled += answered > 0
            rounds += 1

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert [str(each.message) for each in warned] == []
    assert cancelled, "while others had had their turn"


def test_a_stranger_is_refused_unread() -> None:
    """Else anybody could leave unfinished requests, which the node would store."""

    read = []

    async def request() -> AsyncIterator[bytes]:
        read.append(b"")
        yield b""

    async def run() -> None:
        async def found(details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(_answers, bytes)

        details = SimpleNamespace(method="/sublet.v1.Feed/Heads", invocation_metadata=())
        handler = await GateInterceptor(make_gate(PUBLISHES)).intercept_service(found, details)
        with pytest.raises(RuntimeError, match="SUBLET_TOKEN"):
            await handler.stream_unary(request(), _Context())

    asyncio.run(run())
    assert read == []


def test_a_request_has_so_many_bytes() -> None:
    context = _Context()
    assert asyncio.run(parse_request(b"12", bytes, 2, context)) == b"12"
    with pytest.raises(RuntimeError, match="a request of 3 bytes: the limit of this method is 2"):
        asyncio.run(parse_request(b"123", bytes, 2, context))


async def _one_request() -> AsyncIterator[bytes]:
    yield b""


async def _answers(request: object, context: object) -> str:
    return "reply"


def test_a_served_method_without_a_row_is_refused() -> None:
    is_on, is_off = make_gate(), AccessGate()
    for gate in (is_on, is_off):
        assert call(gate, "/sublet.v1.Feed/New", _answers, BEARER) is grpc.StatusCode.PERMISSION_DENIED
    assert call(is_on, "/sublet.v1.Feed/New", None, BEARER) is grpc.StatusCode.PERMISSION_DENIED
    assert call(is_off, "/sublet.v1.Feed/New", None) is None


def test_a_method_that_checks_no_right_is_refused() -> None:
    gate = make_gate(PUBLISHES)

    async def asks(request: object, context: object) -> str:
        gate.get_caller().check(Right.PUBLISH, ORDERS)
        return "reply"

    async def finds(request: object, context: object) -> str:
        assert not gate.get_caller().may(Right.JOIN)
        return "reply"

    assert call(gate, "/sublet.v1.Feed/Publish", _answers, BEARER) is grpc.StatusCode.INTERNAL
    assert call(gate, "/sublet.v1.Feed/Publish", asks, BEARER) == "reply"
    assert call(gate, "/sublet.v1.Feed/Heads", finds, BEARER) == "reply", "which may be of no stream"
    assert call(gate, "/sublet.v1.Feed/Publish", asks) is grpc.StatusCode.UNAUTHENTICATED
    assert call(gate, "/sublet.v1.Session/Poll", _answers, BEARER) == "reply"
    assert call(gate, "/grpc.health.v1.Health/Check", _answers) == "reply"
    assert call(AccessGate(), "/sublet.v1.Feed/Publish", _answers) == "reply"
