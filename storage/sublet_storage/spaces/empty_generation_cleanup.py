"""Deletes the rows of generations without messages, once every group is past them.

A closed generation without a message is declared gone at once, as there is nothing to be retained. When the partition
of a gone one is dropped, only rows are left: its own, those of its streams, and what groups have finished. They go in
small steps under the maintenance term. The streams that descend from a deleted one get its parents instead of it, so
that they wait for whatever is unread before it.

What is left behind is a floor: a row of `lost_generation` for each filter, with the newest that had messages. A
position in a stream that is no more was in messages that are gone, up to there; behind it, in nothing. The greatest
epochs that had begun in it stay in `space.lost_upper_frontier`.
"""

from __future__ import annotations

from typing import Any

import psycopg

from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.isolated_errors import select_done
from sublet_storage.db.store_connection import Guard

STEP = 20
"""How many generations are looked at in one pass."""

REST_S = 60.0
"""How long a generation stays after it was closed: its readers find its end in its rows."""

_READ_GENERATIONS = """
select generation_id from generation
 where state = 'closed' and is_past is null and closed_at < now() - make_interval(secs => %(rest)s)
 order by generation_id limit %(step)s for no key update skip locked"""

_SEE = """
update generation g set is_past = false, state = case when has.messages then g.state else 'gone' end
  from (select u.generation_id, exists (
          select from stream s where s.generation_id = u.generation_id and s.head > 0) as messages
          from unnest(%(generations)s::bigint[]) as u (generation_id)) has
 where g.generation_id = has.generation_id"""

_DROPPED = """
update generation set is_past = true
 where state = 'gone' and is_past is not true and to_regclass('block_' || generation_id) is null"""

_PAST = """
select g.generation_id, g.filter from generation g
 where g.is_past and g.generation_id > %(after)s
 order by g.generation_id limit %(step)s"""

_BEHIND = """
select filter from consumer_group where deleted_at is null and after_generation < %(generation)s"""

_FINISHED = """
select l.group_id from lending l where l.stream_id = any(%(streams)s::bigint[])
 order by l.group_id, l.stream_id for no key update"""

# One that is free at the end has nothing left; a leader, if there is one, has finished it long since.
_UNFINISHED = """
select exists (
  select from lending l join stream s using (stream_id)
   where l.stream_id = any(%(streams)s::bigint[]) and l.unfinished and (l.status <> 'free' or l.position <> s.head))"""

# Not waited for: a leader that makes rows for its streams may wait for rows that are locked here.
_LOCK = "select from generation where generation_id = %(generation)s for update skip locked"

_CHILDREN = """
select stream_id from stream where parents && %(streams)s::bigint[] order by stream_id for no key update"""

# Of its grandparents those that it has a key in common with.
_INHERIT = """
update stream c
   set parents = array(
         select p.stream_id from stream p
          where p.stream_id = any(c.parents) and p.stream_id <> all(%(streams)s::bigint[])
         union
         select p.stream_id from stream gone join stream p on p.stream_id = any(gone.parents)
          where gone.stream_id = any(c.parents) and gone.stream_id = any(%(streams)s::bigint[])
            and p.hash_from < c.hash_to and c.hash_from < p.hash_to
         order by 1)
 where c.stream_id = any(%(children)s::bigint[])"""

_FLOOR = """
insert into lost_generation as l (filter, generation_id, stream_id)
select %(filter)s, %(generation)s, max(stream_id) from stream
 where stream_id = any(%(streams)s::bigint[]) and head > 0 having count(*) > 0
    on conflict (filter) do update set generation_id = greatest(l.generation_id, excluded.generation_id),
                                       stream_id = greatest(l.stream_id, excluded.stream_id)"""

_LOST_EPOCHS = """
update space p set lost_upper_frontier = merge_upper_frontier(p.lost_upper_frontier, s.greatest)
  from (select space_id, jsonb_agg(epoch) as greatest from stream, jsonb_array_elements(upper_frontier) as g(epoch)
         where stream_id = any(%(streams)s::bigint[]) group by space_id) s
 where p.space_id = s.space_id"""

_DELETE = (
    "delete from lending where stream_id = any(%(streams)s::bigint[])",
    "delete from stream where stream_id = any(%(streams)s::bigint[])",
    "delete from generation where generation_id = %(generation)s",
)


class EmptyGenerationCleaner:
    """A cleaner whose passes over an autocommit connection take a few generations each, from where the last one
    ended."""

    def __init__(self, rest_s: float = REST_S, step: int = STEP) -> None:
        self._rest_s, self._step, self._last_generation_id = rest_s, step, 0

    def __call__(self, conn: psycopg.Connection[Any], guard: Guard | None = None) -> list[int]:
        """Find past generations, and delete those that every group is past; return the deleted ones. Raise an error
        with one after all others were done, and at once where others hold a lock."""
        _record_ended(conn, guard, {"rest": self._rest_s, "step": self._step})
        past = conn.execute(_PAST, {"after": self._last_generation_id, "step": self._step}).fetchall()
        self._last_generation_id = past[-1][0] if len(past) == self._step else 0
        done = select_done(conn, past, lambda row: _delete(conn, guard, row[0], TopicFilter(row[1])))
        return [generation_id for generation_id, _ in done]


def _record_ended(conn: psycopg.Connection[Any], guard: Guard | None, parameters: dict[str, float]) -> None:
    with conn.transaction():
        if guard is not None:
            guard(conn)
        ended = [generation_id for (generation_id,) in conn.execute(_READ_GENERATIONS, parameters).fetchall()]
        if ended:
            conn.execute(_SEE, {"generations": ended})
        conn.execute(_DROPPED)


def _delete(conn: psycopg.Connection[Any], guard: Guard | None, generation_id: int, filter: TopicFilter) -> bool:
    """Delete the rows of a generation; return False if a group has not noticed it yet and has to find what it has lost.
    That is read behind the lock, as an import may have created such a group during the wait."""
    with conn.transaction():
        if guard is not None:
            guard(conn)
        conn.execute("lock table space in row exclusive mode")  # before the streams, in the order of changes of spaces
        rows = conn.execute("select stream_id, head from stream where generation_id = %s", (generation_id,)).fetchall()
        streams = [stream_id for stream_id, _ in rows]
        parameters = {"generation": generation_id, "streams": streams}
        if any(head for _, head in rows):
            behind = conn.execute(_BEHIND, parameters).fetchall()
            if any(TopicFilter(text).intersects(filter) for (text,) in behind):
                return False
        if conn.execute(_UNFINISHED, parameters).fetchone() == (True,):
            return False
        conn.execute(_FINISHED, parameters)
        children = [stream_id for (stream_id,) in conn.execute(_CHILDREN, parameters).fetchall()]
        if not conn.execute(_LOCK, parameters).rowcount or conn.execute(_UNFINISHED, parameters).fetchone() == (True,):
            return False  # since: from here on its streams get no more rows
        conn.execute(_INHERIT, {**parameters, "children": children})
        conn.execute(_FLOOR, {**parameters, "filter": filter.text})
        conn.execute(_LOST_EPOCHS, parameters)
        for statement in _DELETE:
            conn.execute(statement, parameters)
        return True
