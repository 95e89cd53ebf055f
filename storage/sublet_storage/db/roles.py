"""The roles of database users and their privileges: one table, for grants and comparisons.

A role cannot log in; users are its members. The owner of the tables may do all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

import psycopg
from msgspec import Struct

Connection = psycopg.Connection[Any]


class DatabaseRole(StrEnum):
    """A role of which database users are members."""

    PUBLISH = "sublet_publish"  # publishes by SQL
    APPEND = "sublet_append"  # publishes by the library, and from Spark
    CONSUME = "sublet_consume"  # has sessions, reads history
    OPERATE = "sublet_operate"  # looks after groups, spaces, nodes and access
    NODE = "sublet_node"  # is a leader node


_LETTERS: Final = {"r": "select", "s": "select", "a": "insert", "w": "update", "d": "delete", "x": "execute"}

_HIDDEN: Final = {
    "block": {"payload"},
    "staged_block": {"payload"},
    "outbox": {"key", "value", "headers"},
    "outbox_rejected": {"key", "value", "headers"},
    "node": {"notify_endpoint"},
    "token": {"digest"},
    "lending": {"grant_key"},
}
"""Columns that are not selected where the table below has an s: messages and credentials."""

# r select, s select without the columns above, a insert, w update, d delete, x execute. A right on `block` is one on
# each partition too; one on `table.column` is on that column alone. Nobody inserts into a column that Postgres numbers
# itself: numbers that others are to get would be taken. What has no row here, a test finds.
_TABLE: Final = """
                          publish append consume operate node
alembic_version           r       r      r       r       r
space                     -       r      r       raw     rawd
generation                -       r      r       r       rawd
generation.space_id       -       -      -       a       -
generation.ordinal        -       -      -       a       -
generation.filter         -       -      -       a       -
generation.state          -       -      -       w       -
generation.closed_at      -       -      -       w       -
lost_generation           -       -      r       r       rawd
stream                    -       r      r       r       rawd
stream.space_id           -       -      -       a       -
stream.generation_id      -       -      -       a       -
stream.hash_from          -       -      -       a       -
stream.hash_to            -       -      -       a       -
stream.parents            -       -      -       a       -
stream.state              -       -      -       w       -
stream.closed_at          -       -      -       w       -
stream_upper_frontier     -       -      -       r       r
block                     -       -      r       s       rawd
payload_location          -       -      r       r       rawd
payload_object            -       -      -       r       rawd
producer                  -       -      -       r       rawd
capability                -       -      -       r       rawd
staged_block              -       a      -       s       rawd
sink_batch                -       -      -       r       rawd
outbox                    -       -      -       s       rawd
outbox_rejected           -       -      -       s       rawd
node                      -       r      s       s       rawd
node.draining             -       -      -       w       -
timeline                  -       -      -       r       rawd
leadership                -       -      -       r       rawd
leadership.step_down_term -       -      -       w       -
consumer_group            -       -      -       raw     rawd
lending                   -       -      -       sawd    rawd
lending_history           -       -      -       ra      rawd
consumed_frontier         -       -      -       rawd    rawd
session_epoch             -       -      -       r       rawd
access                    -       -      -       r       r
access_history            -       -      -       r       r
token                     -       -      -       s       r
token.last_used           -       -      -       -       w
publish()                 x       -      -       -       x
insert_outbox_row()       -       -      -       -       x
message_headers()         -       -      -       -       x
headers_size()            -       -      -       -       x
headers_bytes()           -       -      -       -       x
check_topic()             -       -      -       -       x
topic_levels()            -       -      -       -       x
reject_message()          -       -      -       -       x
is_printable()            -       -      -       -       x
append_block()            -       x      -       -       x
append_blocks()           -       x      -       -       x
check_block()             -       -      -       -       x
is_plain_block()          -       -      -       -       x
check_producer()          -       -      -       -       x
check_incarnation()       -       -      -       -       x
check_lease()             -       -      -       -       x
register_producer()       -       x      -       -       x
record_rejection()        -       -      -       -       x
producer_lock()           -       -      -       -       x
is_fenced()               -       -      -       -       x
lock_producer()           -       x      -       -       x
hold_epochs()             -       x      -       -       x
renew_epochs()            -       x      -       -       x
release_epochs()          -       x      -       -       x
settle_epochs()           -       -      -       -       x
space_upper_frontier()    -       -      -       x       x
complete_epochs()         -       -      -       -       x
enter_sink_batch()        -       x      -       -       x
lock_staged_streams()     -       x      -       -       x
read_staged_blocks()      -       x      -       -       x
delete_staged_blocks()    -       x      -       -       x
discard_staged_blocks()   -       x      -       -       x
append_staged_blocks()    -       x      -       -       x
epoch_at_or_before()      -       -      x       x       x
frontier_admits()         -       -      x       x       x
epoch_numbers()           -       -      x       x       x
numbers_at_or_before()    -       -      x       x       x
is_covered()              -       -      x       x       x
admits_all()              -       -      -       -       x
merge_upper_frontier()    -       -      -       x       x
least_epochs()            -       -      -       -       x
are_epoch_bounds()        -       -      -       -       x
are_epochs()              -       -      -       x       x
are_filters()             -       -      -       x       x
is_consumed_frontier()    -       -      -       x       x
is_range_in_doubt()       -       -      -       x       x
offset_at_time()          -       -      x       x       x
appended_at()             -       -      x       x       x
check_partition()         -       -      x       x       x
payload_locations_of()    -       -      x       x       x
advance()                 -       -      x       -       x
limit_idle_time()         -       -      -       -       x
read_progress()           -       -      x       -       x
read_consumed_frontier()  -       -      x       -       x
read_planned_ranges()     -       -      x       -       x
read_ended_grants()       -       -      x       -       x
ahead_of()                -       -      x       -       x
next_session_epoch()      -       -      x       -       x
last_session_epoch()      -       -      -       x       x
is_session()              -       -      -       -       x
add_leadership()          -       -      -       x       x
end_leaderships()         -       -      -       x       x
timeline_now()            -       -      -       x       x
timeline_number()         -       -      x       x       x
timeline_clock()          -       -      -       -       x
current_timeline()        -       -      -       -       x
timeline_ahead()          -       -      -       -       x
create_partition()        -       -      -       x       x
refuse_isolation()        -       -      -       -       -
note_access()             -       -      -       -       -
allow_access()            -       -      -       x       -
revoke_access()           -       -      -       x       -
store_token()             -       -      -       x       -
revoke_token()            -       -      -       x       -
forget_tokens()           -       -      -       -       x
forget_access_history()   -       -      -       -       x
check_access_history()    -       -      -       -       -
check_access_room()       -       -      -       -       -
check_principal()         -       -      -       -       -
check_rule()              -       -      -       -       -
release_session()         -       -      -       x       -
"""

_FOUND = """
select c.relname::text, null, c.relispartition,
       (select array_agg(a.attname::text order by a.attnum) from pg_attribute a
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
       (select array_agg(a.attname::text) from pg_attribute a where a.attrelid = c.oid and a.attidentity <> '')
  from pg_class c where c.relnamespace = to_regnamespace(%(schema)s) and c.relkind in ('r', 'p', 'v', 'm')
union all
select p.proname::text, oidvectortypes(p.proargtypes), false, '{}', '{}'
  from pg_proc p where p.pronamespace = to_regnamespace(%(schema)s)
 order by 1, 2"""

_RIGHTS = """
with whose as materialized (select %(schema)s::regnamespace as schema, %(user)s::name as name),
found as (select c.oid, c.relname, c.relkind from pg_class c, whose where c.relnamespace = whose.schema),
tables as (
  select oid, relname, privilege, has_table_privilege(whose.name, oid, privilege) as has
    from found, whose,
         unnest('{select, insert, update, delete, truncate, references, trigger}'::text[]) as u (privilege)
   where relkind in ('r', 'p', 'v', 'm'))
select privilege, relname::text, null from tables where has
union all
select privilege, relname, attname
  from tables t join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped, whose
 where not t.has and privilege in ('select', 'insert', 'update', 'references')
   and has_column_privilege(whose.name, t.oid, a.attnum, privilege)
union all
select privilege, relname, null from found, whose, unnest(array['usage', 'select', 'update']) as u (privilege)
 where relkind = 'S' and has_sequence_privilege(whose.name, oid, privilege)
union all
select 'execute', format('%%s(%%s)', proname, oidvectortypes(p.proargtypes)), null
  from pg_proc p join whose on p.pronamespace = whose.schema where has_function_privilege(whose.name, p.oid, 'execute')
union all
select privilege, 'schema', null from whose, unnest(array['usage', 'create']) as u (privilege)
 where has_schema_privilege(whose.name, whose.schema, privilege)"""


_OWNER = """
select quote_ident(rolname) from pg_roles where not rolsuper and oid = coalesce(
  (select relowner from pg_class where oid = to_regclass(quote_ident(%(schema)s) || '.block')),
  (select nspowner from pg_namespace where nspname = %(schema)s))"""

_MEMBERS = """
select r.rolname, array(select m.rolname::text from pg_auth_members a join pg_roles m on m.oid = a.member
                         where a.roleid = r.oid and m.rolname <> current_user order by 1)
  from pg_roles r where r.rolname = any(%s)"""


class DatabasePrivilege(Struct, frozen=True, order=True):
    """A privilege on a table, a function (with its arguments), the schema, or one column of a table."""

    privilege: str
    on: str
    column: str | None = None


class _SchemaObject(Struct, frozen=True):
    """A table or a function of the schema. `listed`: its row in the table above. `numbered`: the columns that Postgres
    fills with numbers."""

    name: str
    listed: str
    columns: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()


def _parse() -> dict[str, dict[DatabaseRole, str]]:
    rows = [line.split() for line in _TABLE.splitlines() if line][1:]
    return {name: dict(zip(DatabaseRole, letters, strict=True)) for name, *letters in rows}


RIGHTS: Final[Mapping[str, Mapping[DatabaseRole, str]]] = _parse()
"""The table above as {object: {role: letters}}."""


def compute_expected_rights(
    conn: Connection, schema: str, roles: Iterable[DatabaseRole]
) -> frozenset[DatabasePrivilege]:
    """Return what members of these roles may do with the schema as it is."""
    requested_roles = list(roles)
    rights = {
        right
        for schema_object in _find_objects(conn, schema)
        for role in requested_roles
        for right in _list_privileges(schema_object, role)
    }
    of_tables = {(right.privilege, right.on) for right in rights if right.column is None}
    rights = {right for right in rights if right.column is None or (right.privilege, right.on) not in of_tables}
    return frozenset(rights | ({DatabasePrivilege("usage", "schema")} if requested_roles else set()))


def read_rights(conn: Connection, schema: str, user: str) -> frozenset[DatabasePrivilege]:
    """Return what a user, a role or `public` may do with the schema; a column's only where not all of the table are."""
    rows = conn.execute(_RIGHTS, {"schema": schema, "user": user}).fetchall()
    return frozenset(DatabasePrivilege(*row) for row in rows)


def find_missing_rights(
    expected: frozenset[DatabasePrivilege], actual: frozenset[DatabasePrivilege]
) -> frozenset[DatabasePrivilege]:
    """Return the privileges of `expected` that are not in `actual`; one on a table includes each of its columns."""
    return frozenset(right for right in expected - actual if DatabasePrivilege(right.privilege, right.on) not in actual)


def read_existing_roles(conn: Connection) -> list[DatabaseRole]:
    """Return the roles that exist on the server, in the order of `DatabaseRole`."""
    rows = conn.execute("select rolname from pg_roles where rolname = any(%s)", (list(DatabaseRole),)).fetchall()
    return sorted((DatabaseRole(name) for (name,) in rows), key=list(DatabaseRole).index)


def create_statements(conn: Connection, schema: str, roles: Iterable[DatabaseRole]) -> Iterator[str]:
    """Yield what makes these roles. A node drops partitions as the owner, which it is a member of without having its
    rights otherwise; never of a superuser."""
    for role in roles:
        yield f"create role {role} nologin{' noinherit' if role is DatabaseRole.NODE else ''}"
        if role is DatabaseRole.NODE and (owner := find_dropping_role(conn, schema)) is not None:
            yield f"grant {owner} to {role}"


def find_dropping_role(conn: Connection, schema: str) -> str | None:
    """Return the quoted name of the owner of the blocks, as which a node drops partitions; None if that is a
    superuser."""
    row = conn.execute(_OWNER, {"schema": schema}).fetchone()
    return None if row is None else str(row[0])


def build_role_statements(conn: Connection, schema: str) -> list[str]:
    """Return statements that make the roles that are missing and give all of them their rights. They may be run
    again."""
    statements = []
    for role in DatabaseRole:
        created, *granted = create_statements(conn, schema, [role])
        statements += [f"do $$ begin {created}; exception when duplicate_object then null; end $$", *granted]
    return [f"{each};" for each in (*statements, "begin", *grant_statements(conn, schema, DatabaseRole), "commit")]


def list_members(conn: Connection) -> list[tuple[DatabaseRole, list[str] | None]]:
    """Return the roles, each with its direct members; None where there is no such role."""
    members_by_role = dict(conn.execute(_MEMBERS, (list(DatabaseRole),)).fetchall())
    return [(role, members_by_role.get(role)) for role in DatabaseRole]


def grant_statements(conn: Connection, schema: str, roles: Iterable[DatabaseRole]) -> Iterator[str]:
    """Yield what gives these roles their rights on the schema as it is, and takes away all others, and all of
    PUBLIC's: it may execute each function that was created, or restored from a dump without its privileges."""
    requested_roles = list(roles)
    for kind in ("tables", "routines", "sequences"):
        yield f'revoke all on all {kind} in schema "{schema}" from {", ".join(("public", *requested_roles))}'
    if not requested_roles:
        return
    everyone = ", ".join(requested_roles)
    yield f'revoke all on schema "{schema}" from {everyone}'
    yield f'grant usage on schema "{schema}" to {everyone}'
    schema_objects = _find_objects(conn, schema)
    for role in requested_roles:
        objects = defaultdict(list)
        for schema_object in schema_objects:
            if privileges := ", ".join(_format_privileges(schema_object, role)):
                objects[privileges].append(f'  "{schema}".{schema_object.name}')
        for privileges, names in objects.items():
            kind = " function" if privileges == "execute" else ""
            listed = ",\n".join(names)
            yield f"grant {privileges} on{kind}\n{listed}\nto {role}"


def _find_objects(conn: Connection, schema: str) -> list[_SchemaObject]:
    schema_objects = []
    for name, arguments, is_partition, columns, numbered in conn.execute(_FOUND, {"schema": schema}).fetchall():
        if arguments is None:
            listed = "block" if is_partition else name
            schema_objects.append(_SchemaObject(name, listed, tuple(columns), tuple(numbered or ())))
        else:
            schema_objects.append(_SchemaObject(f"{name}({arguments})", f"{name}()"))
    return schema_objects


def _list_privileges(schema_object: _SchemaObject, role: DatabaseRole) -> Iterator[DatabasePrivilege]:
    for privilege, columns in _list_columns(schema_object, role):
        for column in columns or (None,):
            yield DatabasePrivilege(privilege, schema_object.name, column)


def _format_privileges(schema_object: _SchemaObject, role: DatabaseRole) -> Iterator[str]:
    """Yield the privileges as GRANT has them."""
    for privilege, columns in _list_columns(schema_object, role):
        yield f"{privilege} ({', '.join(columns)})" if columns else privilege


def _list_columns(schema_object: _SchemaObject, role: DatabaseRole) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each privilege, and on which columns it is; on none: on all."""
    for letter in RIGHTS.get(schema_object.listed, {}).get(role, "-").strip("-"):
        hidden = {"s": _HIDDEN.get(schema_object.listed), "a": schema_object.numbered}.get(letter)
        yield _LETTERS[letter], tuple(each for each in schema_object.columns if each not in hidden) if hidden else ()
    for column in schema_object.columns:
        for letter in RIGHTS.get(f"{schema_object.listed}.{column}", {}).get(role, "-").strip("-"):
            yield _LETTERS[letter], (column,)
