"""The rows of all tables, kept aside and put back: so that each schedule begins with the same ones."""

from __future__ import annotations

from typing import Any

import psycopg

from sublet_storage.db.connect import schema_name

_TABLES = """
select c.oid::regclass::text, c.relname, string_agg(quote_ident(a.attname), ', ' order by a.attnum)
  from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not attisdropped and attgenerated = ''
 where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
 group by c.oid order by c.oid"""
_SEQUENCES = """
select format('select setval(%%L, %%s, %%L)', c.oid::regclass, coalesce(s.last_value, 1), s.last_value is not null)
  from pg_class c join pg_sequences s on s.sequencename = c.relname and s.schemaname = %s
 where c.relnamespace = %s::regnamespace and c.relkind = 'S'"""
_PARTITIONS = "select inhrelid::regclass::text from pg_inherits where inhparent = 'block'::regclass"


class State:
    """As it is when this is made. Partitions that come later are dropped again."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn, schema = conn, schema_name()
        self._partitions = self._attached()
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
        for part in self._attached() - self._partitions:
            self._conn.execute(f"drop table {part}")
        self._conn.execute(self._put_back)

    def _attached(self) -> set[str]:
        return {row[0] for row in self._conn.execute(_PARTITIONS)}
