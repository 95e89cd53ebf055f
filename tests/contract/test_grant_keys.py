"""What a database user can do who may call the functions for consumers, and knows ids, but no key, name or epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from msgspec import structs
from psycopg import sql

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import GrantLost, NotFound, PermissionDenied, SessionRowLocked
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.limits import MAX_ID_BYTES, MAX_SESSION_NAMES_OF_USER, MAX_SUBSCRIPTION_BYTES
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.consumer_progress import SessionIdentity, next_session_epoch
from sublet_storage.groups.coordinator import session_name_owners
from sublet_storage.groups.coordinator.history_queries import delete_old_session_epochs
from tests.contract.group_world import SHARE, Held, Led, PostgresWorld, row_of

pytestmark = pytest.mark.conforms("X5")

FUNCTIONS = (
    *("advance", "read_progress", "read_consumed_frontier", "read_planned_ranges", "read_ended_grants"),
    *("next_session_epoch", "ahead_of"),
)
ALL = TopicFilter("#")
OTHER = Subscription.parse("$share/other/#")


@pytest.fixture
def stranger(postgres: PostgresWorld) -> Iterator[psycopg.Connection[Any]]:
    """Yield the connection of a user with the rights of a consumer, and no others."""
    admin = postgres.connection
    role = sql.Identifier(f"stranger_{admin.info.backend_pid}")
    admin.execute(sql.SQL("create role {}").format(role))
    admin.execute(sql.SQL("grant usage on schema sublet to {}").format(role))
    for name in FUNCTIONS:
        admin.execute(sql.SQL("grant execute on function {} to {}").format(sql.Identifier(name), role))
    with connect(postgres.url) as user:
        user.execute(sql.SQL("set role {}").format(role))
        yield user
    admin.execute(sql.SQL("drop owned by {}").format(role))
    admin.execute(sql.SQL("drop role {}").format(role))


def lending(postgres: PostgresWorld) -> list[tuple[Any, ...]]:
    return postgres.connection.execute("select * from lending order by group_id, stream_id").fetchall()


def drawn(postgres: PostgresWorld, session: str = "etl") -> SessionIdentity:
    """Draw the session's next epoch."""
    return SessionIdentity(session, next_session_epoch(postgres.connection, SHARE, session))


def given(led: Led, session: SessionIdentity, stream: int | None = None) -> Held:
    """Grant the stream to the session."""
    return led.grant(stream, session=session.name, epoch=session.epoch)


def test_a_grant_is_not_moved_without_its_key(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    led = postgres.led(2)
    ours, theirs = (led.grant(stream, session=None) for stream in led.streams)
    postgres.append(ours.stream, 10)
    *ids, key = ours.uses
    before = lending(postgres)
    for guess in (None, b"", bytes(16), key.reveal()[:-1], key.digest(), theirs.key.reveal()):
        for reach in ("4", "10"):
            with pytest.raises(psycopg.Error, match=f"grant {ours.grant_id} and this key") as refused:
                stranger.execute("select advance(%s, %s, %s, %s, %s)", (*ids, reach, guess))
            assert refused.value.sqlstate == "SB001"
        for read in ("read_progress", "read_consumed_frontier"):
            assert stranger.execute(f"select {read}(%s, %s, %s, %s)", (*ids, guess)).fetchone() == (None,), read
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stranger.execute("select * from lending")
    assert lending(postgres) == before
    consumer_progress.advance(stranger, *ours.uses, 4)
    assert consumer_progress.read_position(stranger, *ours.uses) == 4


def test_a_past_grant_answers_to_its_key_alone(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    held = postgres.granted(10)
    group_id, _, _, key = held.uses
    consumer_progress.advance(postgres.connection, *held.uses, 3)
    held.force_release()
    assert held.now().grant_key is None
    assert consumer_progress.read_position(stranger, *held.uses) == 3
    for guess in (GrantSecret.draw(), GrantSecret(key.digest())):
        assert consumer_progress.read_position(stranger, group_id, held.stream, held.grant_id, guess) is None
    stored = postgres.connection.execute("select t::text from lending_history t").fetchall()
    assert key.digest().hex() in str(stored)
    assert key.reveal().hex() not in str(stored)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_key_answers_to_its_own_grant_alone(postgres: PostgresWorld, is_over: bool) -> None:
    """Not if another group, stream or grant is named with it, nor with another key."""
    held, other = postgres.granted(5, atomic=True), postgres.group(OTHER)
    group_id, stream, grant_id, key = held.uses
    (second,) = postgres.add_space("second", "second/#")
    postgres.append(second, 5)
    held.advance(3, consumed=ConsumedFrontier(3))
    named = [(other.group_id, stream, grant_id, key), (group_id, second, grant_id, key)]
    named += [(group_id, stream, grant_id + 1, key), (group_id, stream, grant_id, GrantSecret.draw())]
    if is_over:
        held.force_release()
    before = lending(postgres)
    for uses in named:
        assert consumer_progress.read_position(postgres.connection, *uses) is None, uses
        assert consumer_progress.read_consumed_frontier(postgres.connection, *uses) is None, uses
        with pytest.raises(GrantLost):
            consumer_progress.advance(postgres.connection, *uses, 4, consumed=ConsumedFrontier(4))
    assert lending(postgres) == before
    with pytest.raises(GrantLost):
        consumer_progress.advance(postgres.connection, *held.uses, 4)
    assert lending(postgres) == before, "an atomic group moves by entire epochs"
    assert consumer_progress.read_position(postgres.connection, *held.uses) == 3
    frontier = consumer_progress.read_consumed_frontier(postgres.connection, *held.uses)
    assert frontier == (None if is_over else ConsumedFrontier(3))
    if not is_over:
        consumer_progress.advance(postgres.connection, *held.uses, 3, consumed=ConsumedFrontier(4))
        assert held.now().consumed == ConsumedFrontier(4), "the position may stay"


def test_progress_counts_up_to_the_head_while_held(postgres: PostgresWorld) -> None:
    """A row that an operator has taken back by SQL still has the key of its grant. Who is on another timeline is asked
    of its own group."""
    held, other = postgres.granted(5), postgres.lead(postgres.group(OTHER))
    (longer,) = postgres.add_space("longer", "longer/#")
    postgres.append(longer, 6)
    leads = "update leadership set timeline = %s where leadership_id = %s"
    ((timeline,),) = postgres.connection.execute("select timeline_now()").fetchall()
    postgres.connection.execute(leads, ("former", held.led.group_id))
    with pytest.raises(GrantLost):
        consumer_progress.advance(postgres.connection, *held.uses, 5)
    postgres.connection.execute(leads, (timeline, held.led.group_id))
    postgres.connection.execute(leads, ("former", other.group_id))
    postgres.connection.execute("update lending set status = 'blocked'")
    assert held.advance(5).outcome == "refused"
    with pytest.raises(GrantLost):
        consumer_progress.advance(postgres.connection, *held.uses, 5)
    postgres.connection.execute("update lending set status = 'held'")
    with pytest.raises(GrantLost):
        consumer_progress.advance(postgres.connection, *held.uses, 5, consumed=ConsumedFrontier(5))
    consumer_progress.advance(postgres.connection, *held.uses, 5)
    assert held.now().position == 5
    version = postgres.connection.execute("select ctid from lending where status = 'held'").fetchall()
    assert held.advance(5).outcome == "applied"
    again = postgres.connection.execute("select ctid from lending where status = 'held'").fetchall()
    assert again == version, "what moves nothing writes nothing"
    for position in (5, 6):
        with pytest.raises(GrantLost):
            consumer_progress.advance(postgres.connection, *held.uses, position)


def test_each_grant_has_a_key_of_its_own(postgres: PostgresWorld) -> None:
    led, keys = postgres.led(), set()
    for _ in range(5):
        held = led.grant()
        keys.add(held.key.reveal())
        held.force_release()
        postgres.connection.execute("update lending set losses = 0")
    assert len(keys) == 5
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize(
    "consumed",
    ['{"upto": 4}', '{"upto": 4, "least": [["x"]]}', '{"upto": 4, "least": [[1], [1, 2]]}', '{"upto": 4, "least": 7}',
     '{"upto": 4, "least": [[9223372036854775808]]}', '{"upto": 99, "least": [[9]]}', '{"upto": -1, "least": [[9]]}',
     '{"upto": 4, "least": [[]]}', '{"upto": 4, "least": null, "more": 1}', '{"upto": 4, "least": []}',
     '{"upto": 4, "least": [[9, 9]]}', '{"upto": 4, "least": [[8], [9]]}'],
)  # fmt: skip
def test_a_holder_writes_no_frontier_of_another_form(postgres: PostgresWorld, consumed: str) -> None:
    """It would be read by whoever leads."""
    *ids, key = postgres.granted(10, atomic=True).uses
    postgres.complete(7)
    before, call = lending(postgres), "select advance(%s, %s, %s, 4, %s, %s::jsonb)"
    with pytest.raises(psycopg.Error):
        postgres.connection.execute(call, (*ids, key.reveal(), consumed))
    assert lending(postgres) == before
    postgres.connection.execute(call, (*ids, key.reveal(), '{"upto": 4, "least": [[7]]}'))


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_draw_of_another_name_changes_nothing(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    epoch = drawn(postgres).epoch
    for subscription, session in ((SHARE, "theirs"), (OTHER, "etl")):
        postgres.connection.execute("select next_session_epoch(%s, %s)", (str(subscription), session))
        postgres.connection.execute("update session_epoch set last = last + 1000000 where session <> 'etl'")
        next_session_epoch(stranger, subscription, session)
    assert postgres.store.read_last_session_epoch(SHARE, "etl") == epoch
    assert postgres.store.read_last_session_epoch(SHARE, "nobody's") == 0


@pytest.mark.conforms("X7")
@pytest.mark.parametrize(
    ("subscription", "session"),
    [("", "a"), ("a", ""), (None, "a"), ("a", None), ("a", "é" * 127 + "xx"), ("a", "a\n"), ("é" * 2562 + "a", "a")],
)
def test_a_name_that_cannot_be_draws_nothing(
    postgres: PostgresWorld, subscription: str | None, session: str | None
) -> None:
    with pytest.raises(psycopg.Error, match=r"has 1 to (255|5124) bytes of UTF-8") as refused:
        postgres.connection.execute("select next_session_epoch(%s, %s)", (subscription, session))
    assert refused.value.sqlstate == "SB002"


def test_a_name_at_its_limits_draws_an_epoch(postgres: PostgresWorld) -> None:
    name = ("é" * (MAX_SUBSCRIPTION_BYTES // 2), "é" * (MAX_ID_BYTES // 2) + "x")
    assert postgres.connection.execute("select next_session_epoch(%s, %s) > 0", name).fetchone() == (True,)


@pytest.mark.conforms("X7")
def test_a_database_user_draws_for_so_many_names(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    """Those that are a principal's are counted for it; and others go on."""
    fill = "insert into session_epoch (subscription, session, last, principal) select '$share/x/#', i, 1, %s"
    for principal, first, last in ((None, 2, MAX_SESSION_NAMES_OF_USER), ("user:a", 200_000, 200_010)):
        postgres.connection.execute(f"{fill} from generate_series(%s::int, %s) i", (principal, first, last))
    epoch = drawn(postgres).epoch
    with pytest.raises(PermissionDenied, match=r"has drawn epochs for 100000 names of sessions.*Use the same names"):
        drawn(postgres, "new")
    assert drawn(postgres).epoch > epoch
    postgres.connection.execute("update session_epoch set drawn_by = 'another'")
    assert drawn(postgres, "new").epoch > epoch


def test_old_epochs_are_forgotten_and_stay_below(postgres: PostgresWorld) -> None:
    """Not of a session that has a stream in that group; what was drawn by one that is forgotten is still accepted of
    it."""
    etl, _ = drawn(postgres), next_session_epoch(postgres.connection, OTHER, "etl")
    gone = drawn(postgres, "gone").epoch
    given(postgres.led(), etl)
    postgres.connection.execute("update session_epoch set drawn_at = drawn_at - interval '1 day'")
    young = drawn(postgres, "young").epoch
    for _ in range(2):
        delete_old_session_epochs(postgres.connection, 3600.0)
        postgres.connection.execute(
            "update session_epoch set drawn_at = drawn_at - interval '1 day' where session = ''"
        )
    left = postgres.connection.execute("select session, last from session_epoch order by session").fetchall()
    assert left == [("", gone), ("etl", etl.epoch), ("young", young)]
    assert postgres.store.read_last_session_epoch(SHARE, "gone") == gone
    postgres.connection.execute("update session_epoch set last = last + 1000000000000 where session = ''")
    assert drawn(postgres, "new").epoch == gone + 1_000_000_000_001


def test_another_principal_draws_nothing(postgres: PostgresWorld) -> None:
    """Until the name is released, which is in the history of rights."""
    conn = postgres.connection
    next_session_epoch(conn, Subscription.parse("$share/unbound/#"), "etl")
    session_name_owners.next_session_epoch(conn, SHARE, "nightly", "user:c")
    session_name_owners.next_session_epoch(conn, OTHER, "etl", "user:a")
    first = session_name_owners.next_session_epoch(conn, SHARE, "etl", "user:a")
    with pytest.raises(PermissionDenied, match=r"session 'etl' of .* is another principal's.* access release-session"):
        session_name_owners.next_session_epoch(conn, SHARE, "etl", "user:b")
    assert postgres.store.read_last_session_epoch(SHARE, "etl") == first
    assert session_name_owners.release(conn, SHARE, "etl") == "user:a"
    with pytest.raises(NotFound, match="nothing to release"):
        session_name_owners.release(conn, SHARE, "etl")
    assert session_name_owners.next_session_epoch(conn, SHARE, "etl", "user:b") > first
    noted = conn.execute("select event, principal, object from access_history").fetchall()
    assert noted == [("release-session", "user:a", f"etl of {SHARE}")]
    assert session_name_owners.release(conn, OTHER, "etl") == "user:a", "that of another group stays its own"
    assert session_name_owners.release(conn, SHARE, "nightly") == "user:c", "and so does another of the group"


def test_a_name_too_many_draws_nothing(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_name_owners, "MAX_SESSION_NAMES_OF_PRINCIPAL", 1)
    first = session_name_owners.next_session_epoch(postgres.connection, SHARE, "etl", "user:a")
    with pytest.raises(PermissionDenied, match=r"session 'other': user:a has .*the limit"):
        session_name_owners.next_session_epoch(postgres.connection, SHARE, "other", "user:a")
    assert postgres.connection.execute("select session from session_epoch").fetchall() == [("etl",)]
    assert session_name_owners.next_session_epoch(postgres.connection, SHARE, "etl", "user:a") > first


def test_of_many_at_once_one_gets_the_name(postgres: PostgresWorld) -> None:
    drawn(postgres)

    def bind(number: int) -> bool:
        with connect(postgres.url) as connection:
            try:
                session_name_owners.bind(connection, SHARE, "etl", f"user:{number}")
            except (PermissionDenied, SessionRowLocked):
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(bind, range(6))) == [False] * 5 + [True]


@pytest.mark.conforms("X4")
def test_a_locked_name_is_not_waited_for(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    """Or a user of the database would hold up the connections of a node, which all its groups share."""
    for name in ("etl", "other"):
        drawn(postgres, name)
    stranger.autocommit = False
    last = next_session_epoch(stranger, SHARE, "etl")
    with pytest.raises(SessionRowLocked, match=r"session 'etl' of .*: an open transaction keeps the name locked"):
        postgres.store.bind_session(SHARE, "etl", "user:a")
    postgres.store.bind_session(SHARE, "other", "user:a")
    with connect(postgres.url, statement_timeout_s=30.0) as conn:
        for principal in ("user:a", None):
            with pytest.raises(SessionRowLocked):
                session_name_owners.next_session_epoch(conn, SHARE, "etl", principal)
        assert conn.execute("show lock_timeout").fetchone() == ("0",)
        stranger.commit()
        postgres.store.bind_session(SHARE, "etl", "user:a")
        assert session_name_owners.next_session_epoch(conn, SHARE, "etl", "user:a") > last


def test_plans_are_listed_to_their_session_alone(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    led = postgres.led(2)
    first, second = led.streams
    other = postgres.lead(postgres.group(OTHER))
    older, etl, theirs = drawn(postgres), drawn(postgres), drawn(postgres, "theirs")
    postgres.append(first, 10)
    for group, stream, session in ((led, first, etl), (led, second, theirs), (other, second, etl)):
        held = given(group, session, stream)
        held.advance(0, in_doubt=held.doubt(0, 4 * (stream == first)))

    def listed(
        session: SessionIdentity, group_id: int = led.group_id, streams: Sequence[int] | None = led.streams
    ) -> set[int]:
        return set(consumer_progress.read_last_planned_ranges(stranger, group_id, session, streams))

    assert listed(etl) == {first}
    assert listed(older) == set(), "the row is a later process's"
    guesses = [("etl", 0), ("etl", etl.epoch + 1), ("etl", 2**63 - 1), ("nobody", etl.epoch), ("theirs", etl.epoch * 2)]
    for guess in guesses:
        assert listed(SessionIdentity(*guess)) == set(), guess
    assert listed(etl, other.group_id + 1) == set()
    assert listed(etl, streams=[second]) == set(), "not of what was not asked for"
    assert listed(theirs) == {second}
    assert listed(etl, streams=None) == {first}, "of all"
    count = "select idx_tup_fetch + seq_tup_read from pg_stat_xact_user_tables where relname = 'lending'"
    with postgres.connection.transaction():
        postgres.connection.execute("set local plan_cache_mode = force_generic_plan")
        consumer_progress.read_last_planned_ranges(postgres.connection, led.group_id, etl, [first])
        assert postgres.connection.execute(count).fetchone() == (1,), "it reads no other rows"
    postgres.connection.execute("update lending set in_doubt = null")
    assert listed(etl) == set(), "an operator has taken it back"


def last_plan(postgres: PostgresWorld, led: Led, session: SessionIdentity) -> consumer_progress.LastPlannedRange | None:
    """Return what the session planned last of the stream, as it is read."""
    plans = consumer_progress.read_last_planned_ranges(postgres.connection, led.group_id, session, [led.stream])
    return plans.get(led.stream)


def test_a_plan_is_its_sessions_while_it_is_reserved(postgres: PostgresWorld) -> None:
    """But under no grant any more."""
    led, etl = postgres.led(), drawn(postgres)
    postgres.append(led.stream, 10)
    held = given(led, etl)
    doubt = held.doubt(0, 4)
    held.advance(0, in_doubt=doubt)
    saved_at = postgres.clock() / 1e6
    postgres.clock.advance(0.001)

    plan = consumer_progress.LastPlannedRange(doubt, True, True, held.grant_id, saved_at)
    assert last_plan(postgres, led, etl) == plan
    assert row_of(held.force_release()).status == "reserved"
    assert last_plan(postgres, led, etl) == structs.replace(plan, grant_id=None)


def test_a_plan_outlives_the_grant_of_another_session(postgres: PostgresWorld) -> None:
    """Done, and then granted to another session, which has planned nothing."""
    led, etl = postgres.led(), drawn(postgres)
    postgres.append(led.stream, 10)
    held = given(led, etl)
    doubt = held.doubt(0, 4)
    held.advance(0, in_doubt=doubt)
    held.advance(4)
    held.force_release()
    theirs = given(led, SessionIdentity("theirs", 1))

    assert last_plan(postgres, led, etl) == consumer_progress.LastPlannedRange(
        doubt, False, False, None, postgres.clock() / 1e6
    )
    assert theirs.advance(4, in_doubt=theirs.doubt(4, 5, 1.0)).outcome == "applied"
    assert last_plan(postgres, led, etl) is None


def test_ended_grants_are_listed_to_their_session(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    """With how far it came under them, unless their streams were reset since."""
    etl, theirs = drawn(postgres), drawn(postgres, "theirs")
    streams = postgres.add_space(shards=2)
    led, other = (postgres.lead(postgres.group(name), streams=streams) for name in (SHARE, OTHER))
    for stream in streams:
        postgres.append(stream, 10)
    grants = []
    for each, reached in ((other, 9), (led, 4)):  # whose grants have the same ids
        for stream in streams:
            given(each, etl, stream).release(1)
        postgres.reset(each, ResetTarget.earliest(), now_us=postgres.clock())
        led = postgres.lead(each.group, streams=streams)
        for stream in streams:
            given(led, etl, stream).release(1)
        grants = [given(led, etl, stream) for stream in streams]
        for held in grants:
            held.advance(reached)
            if each is other:
                held.release(reached)
    asked = [(held.stream, held.grant_id) for held in grants]

    def listed(
        session: SessionIdentity = etl, group_id: int = led.group_id, grants: Sequence[tuple[int, int]] = asked
    ) -> dict[tuple[int, int], object]:
        return dict(consumer_progress.read_ended_grants(stranger, group_id, session, grants))

    assert listed() == dict.fromkeys(asked, (1, False)), "neither is over"
    for held in grants:
        held.force_release()
    assert listed() == dict.fromkeys(asked, (4, False))
    for session in (SessionIdentity("etl", 0), SessionIdentity("etl", etl.epoch + 1), SessionIdentity("nobody", 1)):
        assert listed(session) == {}
    assert listed(theirs) == {}
    assert listed(group_id=other.group_id + 1) == {}
    assert listed(grants=asked[:1]) == {asked[0]: (4, False)}
    given(led, theirs, led.streams[0]).release(4)
    assert listed() == dict.fromkeys(asked, (4, False)), "also once others have it"
    postgres.reset(other, ResetTarget.latest(), led.streams[0])
    postgres.reset(led, ResetTarget.earliest(), led.streams[1])
    assert listed() == {asked[0]: (4, False)}
    held = given(postgres.lead(led.group, streams=led.streams), etl)
    postgres.reset(led, ResetTarget.latest(), held.stream, force=True)
    assert listed(grants=[(held.stream, held.grant_id)]) == {}


def test_unread_streams_are_listed_to_members_alone(postgres: PostgresWorld, stranger: psycopg.Connection[Any]) -> None:
    led, etl = postgres.led(3), drawn(postgres)
    first, second, free = led.streams
    for stream, name in ((first, "etl"), (second, "theirs")):
        given(led, SessionIdentity(name, 1), stream)
    for stream in led.streams:
        postgres.append(stream, 3)
    other = postgres.group(OTHER)
    unnoticed, known = postgres.rollover(1)[:2]
    insert = "insert into lending (group_id, stream_id, position) values (%s, %s, 0)"
    for group_id, stream in ((led.group_id, known), (other.group_id, unnoticed)):
        postgres.connection.execute(insert, (group_id, stream))
    for stream in (unnoticed, known):
        postgres.append(stream, 3)

    def unread(session: SessionIdentity, group_id: int) -> dict[int, bool]:
        with connect(postgres.url) as reading:
            wanted = consumer_progress.read_lagging_streams(reading, group_id, session, ALL)
        rows = stranger.execute(
            "select of_stream, is_anothers from ahead_of(%s, %s, %s, '{#}', '{#}')",
            (group_id, session.name, session.epoch),
        ).fetchall()
        assert sorted((stream, one.is_anothers) for stream, one in wanted.items()) == sorted(rows)
        return dict(rows)

    assert unread(etl, led.group_id) == {first: False, second: True, free: False, unnoticed: False, known: False}
    for session, group_id in (
        (SessionIdentity("etl", etl.epoch + 1), led.group_id),
        (SessionIdentity("etl", 0), led.group_id),
        (SessionIdentity("theirs", etl.epoch), led.group_id),
        (SessionIdentity("", 1), led.group_id),
        (etl, other.group_id),
    ):
        assert unread(session, group_id) == {}, (session, group_id)


def test_only_what_lies_ahead_counts_as_unread(postgres: PostgresWorld) -> None:
    """Not what is finished, read to its head, empty, gone, of other topics, or closed before the group began; and
    nothing for a group that was deleted."""
    postgres.group(OTHER)
    postgres.add_space()
    (before,) = postgres.add_space("before", "before/#")
    postgres.append(before, 3)
    postgres.drop_space(2)
    led, etl = postgres.lead(postgres.group()), drawn(postgres)

    def ahead(filters_of_open: str, filters_of_closed: str) -> list[tuple[int, int, int]]:
        asked = "select of_stream, reached, ends from ahead_of(%s, 'etl', %s, %s, %s) order by 1"
        parameters = (led.group_id, etl.epoch, filters_of_open, filters_of_closed)
        return postgres.connection.execute(asked, parameters).fetchall()

    everywhere = "{#,before/#}"
    assert ahead(everywhere, everywhere) == []
    (lost,) = postgres.rollover(1, 1)
    postgres.append(lost, 3)
    read, done = postgres.rollover(1, 2)
    led.sync()
    (vanished,) = postgres.rollover(1, 1)
    postgres.append(vanished, 3)
    (closed,) = postgres.rollover(1, 1)
    postgres.append(closed, 3)
    opened, _ = postgres.rollover(1, 2)
    (elsewhere,) = postgres.add_space("elsewhere", "elsewhere/#")
    for stream in (opened, elsewhere):
        postgres.append(stream, 3)
    for stream in (lost, vanished):
        postgres.retire(postgres.streams.streams[stream].generation.generation_id)
    postgres.connection.execute("update stream set head = 3 where stream_id = any(%s)", ([read, done],))
    postgres.connection.execute("update lending set position = 3 where stream_id = %s", (read,))
    postgres.connection.execute("update lending set status = 'finished' where stream_id = %s", (done,))

    assert ahead(everywhere, everywhere) == [(closed, 0, 3), (opened, 0, 3)]
    assert ahead("{#}", "{}") == [(opened, 0, 3)]
    assert ahead("{}", "{#}") == [(closed, 0, 3)]
    postgres.store.delete_group(SHARE)
    assert ahead("{#}", "{#}") == []
