"""Compares the current user's privileges with those of its roles; reads only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psycopg
from msgspec import Struct, field

from sublet_storage.db.connect import resolve_schema_name
from sublet_storage.db.roles import (
    DatabasePrivilege,
    DatabaseRole,
    compute_expected_rights,
    find_missing_rights,
    read_rights,
)

_USER = """
select current_user::text, u.rolsuper, pg_has_role(c.relowner, 'usage'), pg_has_role(c.relowner, 'member'),
       quote_ident(o.rolname), o.rolsuper,
       array(select r.rolname::text from pg_roles r where r.rolname = any(%s) and pg_has_role(r.oid, 'usage'))
  from pg_roles u, pg_class c join pg_roles o on o.oid = c.relowner
 where u.rolname = current_user and c.oid = to_regclass(quote_ident(%s) || '.block')"""

# A member of the owner's role needs no function for the owner's rights.
_CREATORS = """
select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 cross join aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
 where c.oid = to_regclass(quote_ident(%s) || '.block') and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
   and (a.grantee = 0 or not pg_has_role(a.grantee, c.relowner, 'member'))
 order by 1"""

_PARTITION = re.compile(r"block_[0-9]+")


class UserPrivileges(Struct, frozen=True):
    """The privileges of a user. `is_owner`: it has all. `roles`: those that it is a member of, or has the privileges
    of. `missing` and `excess` refer to these roles; with no role, to `lacking`."""

    user: str
    is_owner: bool = False
    is_member: bool = False
    roles: tuple[DatabaseRole, ...] = ()
    missing: tuple[str, ...] = ()
    excess: tuple[str, ...] = ()
    lacking: dict[DatabaseRole, tuple[str, ...]] = field(default_factory=dict)
    drop_hint: str | None = None
    """Of a node that cannot drop what retention has taken: what helps."""


def compare_rights(conn: psycopg.Connection[Any]) -> UserPrivileges:
    """Compare the rights of the present user with those of its roles; of none, with each role's."""
    schema = resolve_schema_name()
    rows = conn.execute(_USER, (list(DatabaseRole), schema)).fetchall()
    user, is_super, is_owner, may_drop, owner, is_owner_super, member_of = rows[0]
    if is_super or is_owner:
        return UserPrivileges(user, is_owner=True)
    actual = read_rights(conn, schema, user)
    if not member_of:
        lacking = {
            role: find_missing_rights(compute_expected_rights(conn, schema, [role]), actual) for role in DatabaseRole
        }
        fitting = tuple(role for role, missing in lacking.items() if not missing)
        if not fitting:
            return UserPrivileges(user, lacking={role: describe(missing) for role, missing in lacking.items()})
        return UserPrivileges(
            user, roles=fitting, excess=describe(actual - compute_expected_rights(conn, schema, fitting))
        )
    roles = tuple(role for role in DatabaseRole if role in member_of)
    expected, hint = compute_expected_rights(conn, schema, roles), None
    if DatabaseRole.NODE in roles and not may_drop:
        hint = f"A superuser says: grant {owner} to {DatabaseRole.NODE}"
        if is_owner_super:
            hint = (
                "Have the tables owned by a role that is no superuser, and is granted to sublet_node (docs/roles.md)."
            )
    missing, excess = describe(find_missing_rights(expected, actual)), describe(actual - expected)
    return UserPrivileges(user, is_member=True, roles=roles, missing=missing, excess=excess, drop_hint=hint)


def list_creators(conn: psycopg.Connection[Any]) -> list[str]:
    """Return the quoted roles beside the owners, `public` among them, that may create in the schema: functions with
    the owner's rights find there what they call."""
    return [name for (name,) in conn.execute(_CREATORS, (resolve_schema_name(),)).fetchall()]


def describe(rights: Iterable[DatabasePrivilege]) -> tuple[str, ...]:
    """Return them as text, such as `select on space, stream` or `select on node (name, address)`."""
    columns, objects = defaultdict(set), defaultdict(set)
    for right in sorted(rights, key=lambda right: (right.privilege, right.on, right.column or "")):
        name = "partitions of block" if _PARTITION.fullmatch(right.on) else right.on
        if right.column is None:
            objects[right.privilege].add(name)
        else:
            columns[right.privilege, name].add(right.column)
    for (privilege, name), column_names in columns.items():
        objects[privilege].add(f"{name} ({', '.join(sorted(column_names))})")
    return tuple(f"{privilege} on {', '.join(sorted(names))}" for privilege, names in sorted(objects.items()))
