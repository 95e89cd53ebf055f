"""Who would miss a space: what is to be known before it is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from protocol.errors import Conflict
from protocol.words import Filter, Subscription
from storage.catalogue import filled
from storage.routing import Space

LATELY_S = 3600.0
"""Who has published within that time is taken for one who will again."""
MOST_NAMED = 5

_MESSAGES = """
select coalesce(sum(s.head), 0) from stream s join generation g using (generation_id)
 where g.space_id = %(space)s and g.state <> 'gone'"""

_GROUPS = """
select c.kind, c.name, c.filter, count(l.stream_id) filter (where l.status in ('held', 'reserved'))
  from consumer_group c
  left join (lending l join stream s on s.stream_id = l.stream_id and s.space_id = %(space)s) using (group_id)
 where c.deleted_at is null group by c.group_id order by c.name, c.filter, c.kind"""

_PRODUCERS = """
select p.producer_id from producer p join stream s using (stream_id)
 where s.space_id = %(space)s and p.updated_at > clock_timestamp() - make_interval(secs => %(lately)s)
 union
select producer_id from capability where space_id = %(space)s and expired_at is null
 order by 1"""


@dataclass(frozen=True, slots=True)
class UsedBy:
    """A group with messages from the space; so many of its streams are lent to members, or kept for them."""

    subscription: str
    lent: int


@dataclass(frozen=True, slots=True)
class Uses:
    """What a space holds and who uses it. `messages` may be fewer by now in an open generation, never more."""

    messages: int
    groups: tuple[UsedBy, ...]
    producers: tuple[str, ...]

    def told(self) -> list[str]:
        """What there is of it, for people."""
        groups = [f"{one.subscription} ({one.lent} of its streams lent)" for one in self.groups]
        return [
            *([f"it holds {self.messages} messages"] if self.messages else []),
            *([f"groups use it: {_some(groups)}"] if groups else []),
            *([f"producers publish to it: {_some(self.producers)}"] if self.producers else []),
        ]


def uses(conn: psycopg.Connection[Any], space: Space) -> Uses:
    """As it is now."""
    asked = {"space": space.space_id, "lately": LATELY_S}
    ((messages,),) = conn.execute(_MESSAGES, asked).fetchall()
    known, groups = filled(conn), []
    for kind, name, filter, lent in conn.execute(_GROUPS, asked).fetchall():
        subscription = Subscription(kind, name, Filter(filter))
        if lent or known.wanted(subscription.filter).get(space.filter):
            groups.append(UsedBy(str(subscription), lent))
    producers = tuple(row[0] for row in conn.execute(_PRODUCERS, asked))
    return Uses(int(messages), tuple(groups), producers)


def check_unused(conn: psycopg.Connection[Any], space: Space) -> None:
    """Raise `Conflict`, which says who uses it and what helps."""
    if found := uses(conn, space).told():
        raise Conflict(
            f"space {space.name!r} is in use: {'; '.join(found)}. Give --keep, and nothing is lost: its groups "
            "consume what is there until its retention takes it. Or give --force: its messages are gone then, groups "
            "that are behind are blocked, and publishers that are bound to it are refused."
        )


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
