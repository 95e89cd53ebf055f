"""The streams whose holders cannot read on, by what history says of the grants that are in force.

The last word of a holder counts, under the leader that it was said to: the next one is told again. An index has these
lines only, and they are few.
"""

from __future__ import annotations

_LINE = """
select distinct on (h.group_id, h.stream_id) h.group_id, h.stream_id, h.event, h.grant_id, h.borrower_id, h.reason
  from lending_history h where h.event in ('unreadable', 'readable') and {groups}
 order by h.group_id, h.stream_id, h.history_id desc"""

UNREADABLE_NOW = f"""
select h.group_id, h.stream_id, h.reason, (
         select min(b.at) from lending_history b
          where b.group_id = h.group_id and b.stream_id = h.stream_id and b.event = 'unreadable'
            and b.grant_id = h.grant_id and b.history_id > coalesce((
              select max(a.history_id) from lending_history a
               where a.group_id = h.group_id and a.stream_id = h.stream_id and a.event = 'readable'), 0)) as since
  from ({_LINE}) h
  join lending l on l.group_id = h.group_id and l.stream_id = h.stream_id
 where h.event = 'unreadable' and l.status = 'held' and l.grant_id = h.grant_id and l.borrower_id = h.borrower_id"""
"""In SQL: group_id, stream_id, what hinders (`reason`) and `since` when, of `{groups}`, a condition on `h.group_id`."""
