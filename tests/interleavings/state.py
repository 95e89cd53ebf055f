"""The rows of all tables, kept aside and put back: so that each schedule begins with the same ones."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from sublet_storage.db.connect import resolve_schema_name
from sublet_storage.spaces.rollover import partition_table

_TABLES = """
select c.oid::regclass::text, c.relname, string_agg(quote_ident(a.attname), ', ' order by a.attnum)
  from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not attisdropped and attgenerated = ''
 where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
 group by c.oid order by c.oid"""
_SEQUENCES = """
select format('select setval(%%L, %%s, %%L)', c.oid::regclass, coalesce(s.last_value, 1), s.last_value is not null)
  from pg_class c join pg_sequences s on s.sequencename = c.relname and s.schemaname = %s
 where c.relnamespace = %s::regnamespace and c.relkind = 'S'"""
_PARTITIONS = """
select substring(relname from '[0-9]+$')::bigint, coalesce(inhparent, 0) <> 0
  from pg_class left join pg_inherits on inhrelid = oid
 where relnamespace = %s::regnamespace and relkind = 'r' and relname ~ '^block_[0-9]+$'"""


class State:
    """As it is when this is made. Later partitions are dropped again, and those that were dropped made anew."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn, schema = conn, resolve_schema_name()
        self._partitions = self._found()
        conn.execute("create schema kept")
        put_back = ["set session_replication_role = replica"]  # no foreign keys meanwhile
        for table, name, columns in conn.execute(_TABLES, (schema,)).fetchall():
            conn.execute(f'create table kept."{name}" as table {table}')
            put_back += [
                f"delete from {table}",
                f'insert into {table} ({columns}) overriding system value select {columns} from kept."{name}"',
            ]
        put_back += [row[0] for row in conn.execute(_SEQUENCES, (schema, schema)).fetchall()]
        self._put_back = "; ".join([*put_back, "reset session_replication_role"])

    def restore(self) -> None:
        found = self._found()
        for generation_id, _ in found - self._partitions:
            self._conn.execute(sql.SQL("drop table {}").format(partition_table(generation_id)))
        for generation_id, _ in self._partitions - found:
            made = f"create table block_{generation_id} (like block including all)"
            attached = f"alter table block attach partition block_{generation_id} for values in ({generation_id})"
            self._conn.execute(f"{made}; {attached}")
        self._conn.execute(self._put_back)

    def _found(self) -> set[tuple[int, bool]]:
        """Return the generations with a partition, and whether it is attached."""
        return set(self._conn.execute(_PARTITIONS, (resolve_schema_name(),)))
