"""One reset of a group at a time: the second has no pause of its own, and would be given the first one's end.

Whoever resets holds an advisory lock for it, in a transaction that does nothing else: it ends with its process, holds
nothing up that the server clears away, and stays with one connection of the server through any pooler.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from shlex import quote
from typing import Final

from protocol.errors import Conflict
from protocol.words import Start
from storage.connect import connect, schema_name
from storage.groups.model import Group

_CLASS: Final = zlib.crc32(b"sublet resets") & 0x7FFFFFFF

_TIMEOUTS: Final = ("idle_in_transaction_session_timeout", "transaction_timeout")
"""Of the server, or the role: they would end the guard before the reset. The second came with Postgres 17."""

_TAKE = "select pg_try_advisory_xact_lock(%(class)s, %(object)s)"

_HOLDER = """
select a.usename, a.pid, (extract(epoch from a.xact_start) * 1000000)::bigint, g.orders ->> 'paused'
  from pg_locks l join pg_stat_activity a using (pid)
  left join consumer_group g on g.group_id = %(group)s
 where l.locktype = 'advisory' and l.granted and l.objsubid = 2 and l.classid = %(class)s and l.objid = %(object)s
   and l.database = (select oid from pg_database where datname = current_database())"""


@contextmanager
def resetting(url: str, group: Group) -> Iterator[None]:
    """Nobody else resets the group meanwhile. Raises `Conflict`, which names who does, where somebody is at it."""
    place = f"{schema_name()} {group.group_id}"
    wanted = {"class": _CLASS, "object": zlib.crc32(place.encode()) & 0x7FFFFFFF, "group": group.group_id}
    with closing(connect(url, application_name="sublet reset", idle_in_transaction_timeout_s=None)) as guard:
        guard.execute("begin")
        for name in _TIMEOUTS[: 2 if guard.info.server_version >= 170000 else 1]:
            guard.execute(f"set local {name} = 0")
        (row,) = guard.execute(_TAKE, wanted).fetchall()
        if not row[0]:
            raise _taken(group, guard.execute(_HOLDER, wanted).fetchone())
        yield  # what becomes of the guard meanwhile, or afterwards, says nothing of what was done


def _taken(group: Group, holder: tuple[str | None, int, int | None, str | None] | None) -> Conflict:
    """`holder` is None where the other has ended since."""
    user, pid, since_us, why = holder or (None, None, None, None)
    by = f" by database user {user}, process {pid} of the server" if user else ""
    since = f", since {Start.at(since_us)}" if since_us is not None else ""
    what = f" ({why})" if why else ""
    end = f" If that machine is gone: select pg_terminate_backend({pid})." if pid is not None else ""
    return Conflict(
        f"{group.subscription}: it is being reset already{by}{since}{what}; nothing was changed. Wait for the end of "
        f"that, see where the group is then (`sublet groups describe {quote(str(group.subscription))}`), and reset "
        f"it again if need be.{end}"
    )
