"""Creates, alters, drops, rolls over and reshards spaces.

Which spaces a change concerns is decided here; how their generations end and begin is `sublet_storage.spaces.rollover`.
Changes exclude each other by a lock on the table `space`; appends and reads go on meanwhile, and are held up only for
the last few statements, by the rows of the closing streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import psycopg
from msgspec.structs import replace
from psycopg import sql

from sublet_protocol.domain.errors import Conflict, InvalidSetting, PayloadUnavailable
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.store_connection import Guard
from sublet_storage.log import epoch_leases
from sublet_storage.log.block_encoder import COMPRESSIONS
from sublet_storage.objects import location
from sublet_storage.objects.location import parse_location, parse_stored_location
from sublet_storage.objects.object_stores import get_store
from sublet_storage.objects.parallel_calls import TO_READ, run_single
from sublet_storage.spaces.rollover import lock_streams, retry_on_lock_timeout, roll_over_spaces
from sublet_storage.spaces.routing import Space, split_ring
from sublet_storage.spaces.space_queries import DEFAULT_SPACE, find_space_in, list_spaces

DEFAULT_SHARDS = 16
CHANGEABLE = frozenset(
    {"filter", "shards", "retention_s", "rollover_s", "compression", "payload_location", "tier_after_s"}
)
MAX_S = 1000 * 365 * 86400
"""The longest retention and rollover, 1000 years: more would leave the span of Postgres' timestamps."""

_LOCK = "lock table space in share row exclusive mode"

_DUE = """
select p.space_id from space p join generation g using (space_id)
 where g.state = 'open'
   and g.opened_at <= clock_timestamp() - make_interval(secs => least(coalesce(p.rollover_s, p.retention_s / 4.0), %s))
   and exists (select from stream s where s.generation_id = g.generation_id and s.head > 0)"""


def ensure_default(conn: psycopg.Connection[Any], shards: int = DEFAULT_SHARDS) -> None:
    """Create the space `default` with filter `#` if there is none yet, in a schema of whichever version.

    It takes topics from no other: none is less specific.
    """

    def create() -> None:
        conn.execute(_LOCK)
        query = "select from space where name = %s and dropped_at is null"
        if not conn.execute(query, (DEFAULT_SPACE,)).rowcount:
            _create(conn, Space(0, DEFAULT_SPACE, TopicFilter("#"), shards), [])

    retry_on_lock_timeout(conn, create)


def create_space(
    conn: psycopg.Connection[Any],
    name: str,
    filter: str,
    *,
    shards: int = DEFAULT_SHARDS,
    retention_s: int | None = None,
    rollover_s: int | None = None,
    compression: str = "none",
    payload_location: str | None = None,
    tier_after_s: int | None = None,
) -> Space:
    """Create a space for the topics that match `filter`; the less specific spaces they leave roll over.

    The same call again is a no-op. Raise `Conflict` if the name or the filter is taken with other settings.
    """
    settings = (retention_s, rollover_s, compression, payload_location, tier_after_s)
    requested = _check_space(Space(0, name, TopicFilter(filter), shards, *settings))

    def create() -> Space:
        spaces = _lock_spaces(conn)
        for space in spaces:
            if space.name == name:
                return _check_same_settings(space, requested)
        _check_filter_free(requested, spaces)
        return _create(conn, requested, spaces)

    return retry_on_lock_timeout(conn, create)


def alter_space(conn: psycopg.Connection[Any], name: str, **changes: Any) -> Space:
    """Change some of `CHANGEABLE`; streams move only for the filter and the shards. Another way to where payloads lie
    already has to lead there."""
    if unknown := changes.keys() - CHANGEABLE:
        raise InvalidSetting(f"space {name!r}: no such settings: {', '.join(sorted(unknown))}.")
    if "filter" in changes:
        changes["filter"] = TopicFilter(changes["filter"])
    if changes.get("payload_location") is not None:
        check_reaches_objects(conn, name, changes["payload_location"])

    def alter() -> Space:
        spaces = _lock_spaces(conn)
        former = find_space_in(name, spaces)
        altered = _check_space(replace(former, **changes))
        if altered.filter != former.filter:
            _check_not_default(name, "has the filter # for ever, so that every topic has a space")
            _check_filter_free(altered, [space for space in spaces if space is not former])
        _update(conn, altered)
        if (altered.filter, altered.shards) != (former.filter, former.shards):
            affected = _find_affected(spaces, former, altered) if altered.filter != former.filter else []
            roll_over_spaces(conn, [former, *affected], [altered, *affected], former.space_id)
        return altered

    return retry_on_lock_timeout(conn, alter)


def reshard(conn: psycopg.Connection[Any], name: str, shards: int) -> Space:
    """Change the number of streams of the space, in a new generation. The same number is a no-op."""
    return alter_space(conn, name, shards=shards)


def drop_space(
    conn: psycopg.Connection[Any],
    name: str,
    check: Callable[[psycopg.Connection[Any], Space], None] | None = None,
    *,
    purge: bool = False,
    space_id: int | None = None,
) -> None:
    """Drop the space: its topics fall to the next less specific spaces; its messages stay until their retention ends,
    or end now with `purge`. `check` may raise once no publisher can use it any more: then nothing has happened.
    `space_id`: the id it must have; raises `Conflict` if another space has the name by now."""
    check_droppable(name)

    def drop() -> None:
        spaces = _lock_spaces(conn)
        dropped = find_space_in(name, spaces)
        if space_id not in (None, dropped.space_id):
            raise Conflict(
                f"space {name!r}: the one that was meant (id {space_id}) is gone, and another has its name by now (id "
                f"{dropped.space_id}). Nothing was dropped. Look at this one first, with --dry-run."
            )
        fallback_spaces = find_fallback_spaces(spaces, dropped)
        if check is not None:
            lock_streams(conn, [dropped, *fallback_spaces])
            check(conn, dropped)
        conn.execute("update space set dropped_at = clock_timestamp() where space_id = %s", (dropped.space_id,))
        roll_over_spaces(conn, [dropped, *fallback_spaces], fallback_spaces, dropped.space_id)
        epoch_leases.complete_space(conn, dropped.space_id)
        if purge:
            conn.execute("update generation set state = 'gone' where space_id = %s", (dropped.space_id,))

    retry_on_lock_timeout(conn, drop)


def check_droppable(name: str) -> None:
    """Raise `InvalidSetting` for the space that is there for ever."""
    _check_not_default(name, "cannot be dropped")


def find_fallback_spaces(spaces: list[Space], space: Space) -> list[Space]:
    """Return the other spaces that its topics fall to when it is dropped."""
    return _find_affected(spaces, space)


def rollover(conn: psycopg.Connection[Any], space: str | Space) -> int:
    """Close the space's generation and open the next; return the new generation's id."""
    name = space if isinstance(space, str) else space.name

    def roll() -> int:
        current = find_space_in(name, _lock_spaces(conn))
        return roll_over_spaces(conn, [current], [current], current.space_id)[current.space_id]

    return retry_on_lock_timeout(conn, roll)


def roll_over_due(conn: psycopg.Connection[Any], guard: Guard | None = None, only: str | None = None) -> list[str]:
    """Roll over every space whose generation holds messages and is older than its `rollover_s`; return their names.

    A space with retention but no `rollover_s` rolls over every quarter of its retention, or nothing would ever end.
    `only`: leave all spaces but this one alone.
    """

    def roll() -> list[str]:
        if guard is not None:
            guard(conn)
        rolling = [space for space in _list_due(conn, _lock_spaces(conn)) if only in (None, space.name)]
        for space in rolling:
            roll_over_spaces(conn, [space], [space], space.space_id)
        return [space.name for space in rolling]

    return retry_on_lock_timeout(conn, roll)


def list_overdue_rollovers(conn: psycopg.Connection[Any]) -> list[str]:
    """Return the names of the spaces that `roll_over_due` would roll over now; no lock is taken."""
    return [space.name for space in _list_due(conn, list_spaces(conn))]


def _list_due(conn: psycopg.Connection[Any], spaces: Iterable[Space]) -> list[Space]:
    due = {row[0] for row in conn.execute(_DUE, (MAX_S,))}
    return [space for space in spaces if space.space_id in due]


def _lock_spaces(conn: psycopg.Connection[Any]) -> list[Space]:
    conn.execute(_LOCK)
    return list_spaces(conn)


def _check_space(space: Space) -> Space:
    if not space.name.isprintable() or not 0 < len(space.name) <= 63 or set(space.name) & set("/+#$ "):
        raise InvalidSetting(
            f"space name {space.name!r}: 1 to 63 printable characters without blanks, /, +, # and $. Choose another."
        )
    split_ring(space.shards)
    spans = (
        ("retention_s", space.retention_s), ("rollover_s", space.rollover_s), ("tier_after_s", space.tier_after_s)
    )  # fmt: skip
    for setting, seconds in spans:
        if seconds is not None and not 0 < seconds <= MAX_S:
            rule = "above 0 seconds" if seconds <= 0 else f"at most {MAX_S} seconds (1000 years)"
            raise InvalidSetting(
                f"{setting} {seconds}: must be {rule}. Leave it out for no limit, or alter it to none."
            )
    if space.compression not in COMPRESSIONS:
        raise InvalidSetting(f"compression {space.compression!r}: choose one of {', '.join(COMPRESSIONS)}.")
    if space.payload_location is None and space.tier_after_s is not None:
        raise InvalidSetting(
            f"tier_after_s {space.tier_after_s}: space {space.name!r} has no payload location that its payloads could "
            "be moved to. Give it `payload_location` too, or leave this out."
        )
    if space.payload_location is None:
        return space
    return replace(space, payload_location=str(location.parse_location(space.payload_location)))


def _check_same_settings(space: Space, requested: Space) -> Space:
    if replace(space, space_id=0) != requested:
        raise Conflict(
            f"space {space.name!r} exists with other settings ({_encode_settings(space)}; asked for: "
            f"{_encode_settings(requested)}). Use it as it is, or choose another name; its shards are changed by "
            "`sublet spaces reshard`."
        )
    return space


def _encode_settings(space: Space) -> str:
    settings = {name: getattr(space, name) for name in _COLUMNS[1:]}
    return ", ".join(f"{name} {'none' if value is None else value}" for name, value in settings.items())


def _check_filter_free(requested: Space, spaces: Iterable[Space]) -> None:
    for space in spaces:
        if space.filter == requested.filter:
            raise Conflict(
                f"filter {requested.filter.text!r} is that of space {space.name!r} already. Use that space, or choose "
                "another filter."
            )


def _check_not_default(name: str, rule: str) -> None:
    if name == DEFAULT_SPACE:
        raise InvalidSetting(f"space {name!r} {rule}. Create a more specific space instead.")


def _create(conn: psycopg.Connection[Any], requested: Space, spaces: list[Space]) -> Space:
    values = {name: value for name, value in zip(_COLUMNS, _to_row(requested), strict=True) if value is not None}
    statement = sql.SQL(
        "insert into space (filter_since, {}) values ((select coalesce(max(stream_id), 0) from stream), {})"
        " returning space_id"
    ).format(sql.SQL(", ").join(map(sql.Identifier, values)), sql.SQL(", ").join(sql.Placeholder() * len(values)))
    row = conn.execute(statement, list(values.values())).fetchone()
    assert row is not None
    created = replace(requested, space_id=row[0])
    affected = _find_affected(spaces, created)
    roll_over_spaces(conn, affected, [created, *affected], created.space_id)
    return created


def _update(conn: psycopg.Connection[Any], altered: Space) -> None:
    """Store the new space. If it has payloads already, another way to the same location applies to these as well."""
    conn.execute(
        "update space set filter_since = case when filter = %s then filter_since"
        " else (select coalesce(max(stream_id), 0) from stream) end,"
        " former_filters = array(select unnest(former_filters || filter) except select %s),"
        " name = %s, filter = %s, shards = %s, retention_s = %s, rollover_s = %s, compression = %s,"
        " payload_location = %s, tier_after_s = %s, payload_locations = array("
        "   select case when split_part(known, '?', 1) = split_part(%s, '?', 1) then %s else known end"
        "     from unnest(payload_locations) as known)"
        " where space_id = %s",
        (
            altered.filter.text,
            altered.filter.text,
            *_to_row(altered),
            altered.payload_location,
            altered.payload_location,
            altered.space_id,
        ),
    )


_COLUMNS = ("name", "filter", "shards", "retention_s", "rollover_s", "compression", "payload_location", "tier_after_s")


def _to_row(space: Space) -> tuple[object, ...]:
    settings = (space.retention_s, space.rollover_s, space.compression, space.payload_location, space.tier_after_s)
    return (space.name, space.filter.text, space.shards, *settings)


def _find_affected(spaces: list[Space], *changed: Space) -> list[Space]:
    """Return the other spaces that win or lose topics: less specific, and sharing some with a form of the changed
    one."""
    return [
        space
        for space in spaces
        if space.space_id not in {form.space_id for form in changed}
        and any(
            space.filter.intersects(form.filter) and form.filter.specificity < space.filter.specificity
            for form in changed
        )
    ]


_USED = "select payload_locations_of(space_id) from space where name = %s and dropped_at is null"


def check_reaches_objects(conn: psycopg.Connection[Any], space: str, text: str) -> None:
    """Raise `InvalidSetting` if payloads of the space lie at this location, and these options do not lead to them."""
    target = parse_location(text)
    used = [
        parse_stored_location(each) for (locations,) in conn.execute(_USED, (space,)).fetchall() for each in locations
    ]
    for former in used:
        if former.prefix != target.prefix or former.options == target.options:
            continue
        store = get_store(replace(target, marker=former.marker))
        try:
            run_single(store, TO_READ, store.check_marker)
        except PayloadUnavailable as error:
            detail = str(error).partition(". ")[0]
            raise InvalidSetting(
                f"payload_location {str(target)!r}: payloads of space {space!r} lie there already, and these "
                f"options must lead to them: {detail}. Correct the options, or run this where the location can "
                "be reached; nothing was changed."
            ) from error
