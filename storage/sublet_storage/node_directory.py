"""The directory of leader nodes: registration by lease, unique names, and the look-up by borrowers.

A node is registered under a lease, by the database's clock. A name belongs to one incarnation at a time: when that
one's lease has run out, the next may take it. The desired state of a live node is here too
(`sublet_storage.groups.admin.node_desired_state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psycopg
from msgspec import Struct
from msgspec.structs import asdict

from sublet_protocol.domain.errors import Conflict, NodeNameTaken, NotFound


class NodeIncarnation(Struct, frozen=True):
    """One incarnation of a node: a name can come back, an incarnation cannot."""

    name: str
    incarnation: str
    address: str


class NodeEntry(Struct, frozen=True):
    """A registered node; `remaining_s` <= 0: the lease has run out. `notify_driver`: by which notifications reach it.
    `is_draining`: it is to lead nothing any more."""

    node: NodeIncarnation
    http_address: str | None
    protocol_version: int
    started_at: datetime
    remaining_s: float
    notify_driver: str = "poll"
    is_draining: bool = False


_REGISTER = """
insert into node as n (name, incarnation, address, http_address, protocol_version, notify_endpoint, draining,
                       expires_at)
values (%(name)s, %(incarnation)s, %(address)s, %(http)s, %(version)s, %(notify_endpoint)s, %(draining)s,
        clock_timestamp() + make_interval(secs => %(lease_s)s))
on conflict (name) do update
   set incarnation = excluded.incarnation, address = excluded.address, http_address = excluded.http_address,
       protocol_version = excluded.protocol_version, notify_endpoint = excluded.notify_endpoint,
       expires_at = excluded.expires_at,
       draining = case when n.incarnation = excluded.incarnation then n.draining else excluded.draining end,
       started_at = case when n.incarnation = excluded.incarnation then n.started_at else excluded.started_at end
 where n.incarnation = excluded.incarnation or n.expires_at <= clock_timestamp()
returning name"""

_RENEW = """
update node set expires_at = clock_timestamp() + make_interval(secs => %s) where name = %s and incarnation = %s"""

_LIVE = """
select name, incarnation, address from node where expires_at > clock_timestamp() and not draining order by name"""

_ALL = """
select name, incarnation, address, http_address, protocol_version, started_at,
       extract(epoch from expires_at - clock_timestamp())::float8, notify_driver, draining
  from node order by name"""

_LED = """
select incarnation, count(*) from leadership
 where leadership_id <> 0 and expires_at > clock_timestamp() group by incarnation"""

_ENDPOINTS = """
select distinct notify_endpoint from node
 where expires_at > clock_timestamp() and notify_endpoint is not null order by notify_endpoint"""


def register(
    conn: psycopg.Connection[Any],
    node: NodeIncarnation,
    lease_s: float,
    protocol_version: int,
    http_address: str | None = None,
    notify_endpoint: str | None = None,
    *,
    is_draining: bool = False,
) -> None:
    """Register the node for `lease_s`; the same incarnation again changes its addresses and renews.
    `notify_endpoint`: that of its notification driver. `is_draining`: it was to lead nothing any more, as it last read
    in its row, which may have been deleted meanwhile.

    Raise `NodeNameTaken` while another incarnation's lease on the name lives, with the seconds it has left: wait as
    long and try again; if the other has renewed meanwhile, it is alive.
    """
    parameters = {
        "name": node.name,
        "incarnation": node.incarnation,
        "address": node.address,
        "http": http_address,
        "version": protocol_version,
        "notify_endpoint": notify_endpoint,
        "draining": is_draining,
        "lease_s": lease_s,
    }
    while conn.execute(_REGISTER, parameters).fetchone() is None:
        for entry in list_nodes(conn):
            if entry.node.name == node.name and entry.remaining_s > 0:
                raise NodeNameTaken(node.name, entry.node.address, entry.remaining_s)


def renew(conn: psycopg.Connection[Any], node: NodeIncarnation, lease_s: float) -> bool:
    """Extend the lease; return False if the name is another incarnation's by now, or was removed: register again."""
    return conn.execute(_RENEW, (lease_s, node.name, node.incarnation)).rowcount == 1


def deregister(conn: psycopg.Connection[Any], node: NodeIncarnation) -> None:
    """Delete this incarnation's registration; another one's of the same name stays."""
    conn.execute("delete from node where name = %s and incarnation = %s", (node.name, node.incarnation))


def list_live_nodes(conn: psycopg.Connection[Any]) -> list[NodeIncarnation]:
    """Return the nodes to go to, by name: their leases live, and they are not draining."""
    return [NodeIncarnation(*row) for row in conn.execute(_LIVE)]


def list_notify_endpoints(conn: psycopg.Connection[Any]) -> list[str]:
    """Return where the notifications of publishers reach the nodes whose leases live."""
    return [row[0] for row in conn.execute(_ENDPOINTS)]


def list_nodes(conn: psycopg.Connection[Any]) -> list[NodeEntry]:
    """Return the entire directory by name, with the nodes that have stopped renewing and were not collected yet."""
    return [NodeEntry(NodeIncarnation(*row[:3]), *row[3:]) for row in conn.execute(_ALL)]


def find_live(conn: psycopg.Connection[Any], name: str) -> NodeEntry:
    """Return the node of that name whose lease lives. Raise `NotFound`."""
    entry = next((each for each in list_nodes(conn) if each.node.name == name and each.remaining_s > 0), None)
    if entry is None:
        raise NotFound(f"no node {name!r:.80} is there. `sublet nodes list` shows those that are.")
    return entry


def check_successor(conn: psycopg.Connection[Any], name: str) -> None:
    """Raise `Conflict` if no other node could lead the groups of this one."""
    if all(each.name == name for each in list_live_nodes(conn)):
        raise Conflict(
            f"no other node is there to take over from {name}, and groups without a leader stand still. Start one "
            "first, or give --force (over HTTP: force)."
        )


def node_to_json(entry: NodeEntry, led: Mapping[str, int]) -> dict[str, Any]:
    """Return a registered node as JSON; `led` is what `count_led_groups` returns."""
    fields = {**asdict(entry.node), **asdict(entry)}
    for inner in ("node", "is_draining", "remaining_s"):
        del fields[inner]
    return {
        **fields,
        "started_at": entry.started_at.isoformat(),
        "leads": led.get(entry.node.incarnation, 0),
        "draining": entry.is_draining,
        "alive": entry.remaining_s > 0,
        "lease_remaining_s": round(entry.remaining_s, 3),
    }


def delete_expired(conn: psycopg.Connection[Any]) -> list[str]:
    """Delete registrations whose leases have run out by now. Return the names of their nodes.

    A node that renews at the same time is either deleted first, and learns it from `renew`, or stays.
    """
    return sorted(
        row[0] for row in conn.execute("delete from node where expires_at <= clock_timestamp() returning name")
    )


def count_led_groups(conn: psycopg.Connection[Any]) -> dict[str, int]:
    """Return {incarnation: how many groups it leads}."""
    return dict(conn.execute(_LED).fetchall())
