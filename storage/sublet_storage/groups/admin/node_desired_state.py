"""The desired state of live nodes: draining, or stepping down as a leader.

It is in rows, and each node reads its own. `draining` is of one incarnation of a node and ends with it; a command to
step down is for one term, so only the leader of that term applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import NotFound
from sublet_storage.db.clock import DATABASE_USER
from sublet_storage.groups.model.records import COMMAND, MAINTENANCE
from sublet_storage.node_directory import NodeIncarnation

_READ = """
select n.draining, coalesce(jsonb_object_agg(l.leadership_id, l.term) filter (where l.leadership_id is not null), '{}')
  from node n left join leadership l on l.incarnation = n.incarnation and l.step_down_term = l.term
 where n.name = %s and n.incarnation = %s group by n.name"""

_LED = """
select l.leadership_id, l.term, '$' || g.kind || '/' || g.name || '/' || g.filter
  from leadership l join consumer_group g on g.group_id = l.leadership_id
 where l.incarnation = %s and l.expires_at > clock_timestamp() and g.deleted_at is null order by 3"""

_LEADERS = """
select leadership_id, node from leadership
 where leadership_id = any(%s::bigint[]) and expires_at > clock_timestamp()"""

_NOTE = f"""
insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)
select clock_timestamp(), leadership_id, 0, '{COMMAND}', 'node ' || node || '{{}}, by ' || {DATABASE_USER}, 0, 0, term
  from affected where leadership_id <> {MAINTENANCE}"""
"""Recorded since the next leader's record would look as if the one before had died."""

_STEP_DOWN = f"""
with affected as (
  update leadership l set step_down_term = u.term from unnest(%s::bigint[], %s::bigint[]) as u (id, term)
   where l.leadership_id = u.id and l.term = u.term and l.step_down_term is distinct from u.term returning l.*)
{_NOTE.format(" is to step down")}"""

_DRAIN = f"""
with changed as (update node set draining = %s where name = %s and incarnation = %s returning incarnation, draining),
affected as (
  select l.* from leadership l join changed using (incarnation) where draining and l.expires_at > clock_timestamp()
), noted as ({_NOTE.format(" is to lead nothing any more")})
select from changed"""


class NodeDesiredState(Struct, frozen=True):
    """The desired state of one node. `step_down`: {leadership: term}."""

    is_draining: bool
    step_down: Mapping[int, int]


class LedGroupRef(Struct, frozen=True):
    """A group that a node leads, under that term."""

    group_id: int
    term: int
    subscription: str


def read_desired_state(conn: psycopg.Connection[Any], node: NodeIncarnation) -> NodeDesiredState | None:
    """Return the desired state of this node; None, where it is not registered."""
    row = conn.execute(_READ, (node.name, node.incarnation)).fetchone()
    return None if row is None else NodeDesiredState(row[0], {int(i): term for i, term in row[1].items()})


def set_draining(conn: psycopg.Connection[Any], node: NodeIncarnation, draining: bool) -> None:
    """Make this incarnation of the node drain, or lead again. Raise `NotFound` if it is over. It is recorded in the
    history of the groups that it leads."""
    if not conn.execute(_DRAIN, (draining, node.name, node.incarnation)).fetchall():
        raise NotFound(f"node {node.name} has just ended. `sublet nodes list` shows those that live.")


def request_step_down(conn: psycopg.Connection[Any], led: Iterable[LedGroupRef]) -> None:
    """Make these leaders step down, and no later ones of the same groups. Their groups' history has the user."""
    pairs = [(each.group_id, each.term) for each in led]
    conn.execute(_STEP_DOWN, ([group_id for group_id, _ in pairs], [term for _, term in pairs]))


def groups_led_by(conn: psycopg.Connection[Any], node: NodeIncarnation) -> list[LedGroupRef]:
    """Return the groups that this incarnation of the node leads, by name; maintenance is no group."""
    return [LedGroupRef(*row) for row in conn.execute(_LED, (node.incarnation,)) if row[0] != MAINTENANCE]


def leaders_of(conn: psycopg.Connection[Any], group_ids: Iterable[int]) -> dict[int, str]:
    """Return {group: name of the node that leads it now}, of those that are led."""
    return dict(conn.execute(_LEADERS, (list(group_ids),)).fetchall())
