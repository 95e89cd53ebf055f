"""The present user's rights on the tables, compared with what consumers, publishers and nodes need; reads only."""

from __future__ import annotations

from typing import Any

import psycopg

_READ = (
    "space",
    "generation",
    "stream",
    "block",
    "consumer_group",
    "leadership",
    "lending",
    "lending_history",
    "node",
    "payload_location",
)
_PUBLISHED = {
    "select": ("space", "generation", "stream", "block", "producer", "capability", "staged_block", "sink_batch"),
    "insert": ("block", "producer", "capability", "staged_block", "sink_batch"),
    "update": ("space", "stream", "producer", "capability", "sink_batch"),
    "delete": ("capability", "staged_block"),
}
CONSUMERS, PUBLISHERS, NODES = "consumers", "publishers", "nodes"

_MISSING = """
with kept as (select oid, relname as name from pg_class
               where relnamespace = current_schema()::regnamespace and relkind in ('r', 'p'))
select needed.who, needed.what || ' on ' || string_agg(needed.name, ', ' order by needed.name)
  from (select * from unnest(%(who)s::text[], %(what)s::text[], %(name)s::text[]) as given (who, what, name)
        union all
        select %(nodes)s, what, name from kept, unnest(array['select', 'insert', 'update', 'delete']) as u (what)
       ) as needed join kept using (name)
 where not has_table_privilege(kept.oid, needed.what) group by needed.who, needed.what
union all
select %(nodes)s, 'execute on ' || string_agg(distinct proname, ', ') from pg_proc
 where pronamespace = current_schema()::regnamespace and not has_function_privilege(oid, 'execute')
having count(*) > 0
 order by 1, 2"""


def find_missing_privileges(connection: psycopg.Connection[Any]) -> dict[str, list[str]]:
    """Return {consumers, publishers or nodes: the rights that they need and this user has not, such as `insert on
    block`}.

    Publishers are those that publish with epochs, and from Spark, as well. Tables that a schema of another version does
    not have are not needed.
    """
    needed = [(CONSUMERS, "select", name) for name in _READ]
    needed += [(PUBLISHERS, what, name) for what, names in _PUBLISHED.items() for name in names]
    who, what, name = (list(column) for column in zip(*needed, strict=True))
    found: dict[str, list[str]] = {}
    parameters = {"who": who, "what": what, "name": name, "nodes": NODES}
    for whose, right in connection.execute(_MISSING, parameters).fetchall():
        found.setdefault(whose, []).append(right)
    return found


def grant_statement(schema: str, user: str, for_whom: str) -> str:
    """Return what the owner of the schema executes so that the user may be a consumer, a publisher or a node."""
    rights = "select" if for_whom == CONSUMERS else "select, insert, update, delete"
    return (
        f'grant usage on schema {schema} to "{user}"; grant {rights} on all tables in schema {schema} to "{user}"; '
        f'grant execute on all functions in schema {schema} to "{user}"'
    )
