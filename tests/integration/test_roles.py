"""What members of each role may do with the tables and functions: what the table of `sublet_storage.db.roles` says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.limits import MAX_WEIGHTS
from sublet_storage.bootstrap.embedded.binaries import find_binaries
from sublet_storage.bootstrap.migrate import downgrade, make_roles, migrate
from sublet_storage.db.connect import connect
from sublet_storage.db.roles import (
    RIGHTS,
    DatabasePrivilege,
    DatabaseRole,
    _find_objects,
    build_role_statements,
    compute_expected_rights,
    find_missing_rights,
    list_members,
    read_existing_roles,
    read_rights,
)
from sublet_storage.doctor.checks import DoctorCheckResult, Severity, run_checks
from sublet_storage.log.append import ProducerIdentity
from sublet_storage.log.epoch_leases import hold
from sublet_storage.spaces.space_changes import create_space, drop_space, rollover
from tests.integration.cli_kit import REPOSITORY, a_shell, done, refused
from tests.role_kit import OWNER, RoleWorld, a_role_world

pytestmark = pytest.mark.conforms("X6")

PUBLIC = "public"


@pytest.fixture(scope="module")
def shared_world() -> Iterator[RoleWorld]:
    with a_role_world() as world:
        yield world


@pytest.fixture
def world(shared_world: RoleWorld) -> RoleWorld:
    """Return the world with the rights of the table, whatever an earlier test has changed."""
    make_roles(shared_world.admin)
    return shared_world


@pytest.fixture
def admin(world: RoleWorld) -> Iterator[psycopg.Connection[Any]]:
    with connect(world.admin) as conn:
        yield conn


def unlisted(conn: psycopg.Connection[Any]) -> list[str]:
    """Tables and functions that are not in the table."""
    return [each.listed for each in _find_objects(conn, "sublet") if each.listed not in RIGHTS]


def too_much(conn: psycopg.Connection[Any]) -> dict[str, list[DatabasePrivilege]]:
    """Return {role: rights beyond the table}; fail if a right of the table is missing."""
    found = {}
    for who in (*DatabaseRole, PUBLIC):
        expected = compute_expected_rights(conn, "sublet", () if who == PUBLIC else (DatabaseRole(who),))
        has = read_rights(conn, "sublet", who)
        assert find_missing_rights(expected, has) == frozenset(), who
        if has != expected:
            found[str(who)] = sorted(has - expected, key=str)
    return found


def test_each_role_may_do_what_the_table_says(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """After migrations up and down, and of partitions that are made later."""
    assert unlisted(admin) == []
    assert too_much(admin) == {}
    with connect(world.of(DatabaseRole.OPERATE)) as operator:
        create_space(operator, "more", "more/#")
    assert admin.execute("select count(*) from pg_inherits where inhparent = 'block'::regclass").fetchone() == (3,)
    assert too_much(admin) == {}
    downgrade(world.owner)
    assert too_much(admin) == {}
    assert admin.execute("select count(*) from pg_proc where pronamespace = 'sublet'::regnamespace").fetchone() == (0,)
    migrate(world.owner)
    assert unlisted(admin) == []
    assert too_much(admin) == {}
    admin.execute("alter table node add former int; alter table node drop former")
    assert too_much(admin) == {}, "columns that are gone"


def test_rights_of_public_are_not_those_of_partitions(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """And keep none from being made."""
    admin.execute("grant select on block to public; grant select (stream_id) on block to public")
    try:
        create_space(admin, "public", "public/#")
        made = """
            select max(generation_id) is not null and not has_any_column_privilege(
              'user_of_sublet_publish', format('block_%s', max(generation_id)), 'select') from generation"""
        assert admin.execute(made).fetchone() == (True,)
    finally:
        admin.execute("revoke select on block from public; revoke select (stream_id) on block from public")


def test_a_partition_is_of_an_open_generation(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """By `create_partition`, whatever other generation is open."""
    space = create_space(admin, "closing", "closing/#").space_id
    rollover(admin, "closing")
    asked = "select generation_id from generation where space_id = %s and state = 'closed'"
    ((closed,),) = admin.execute(asked, (space,)).fetchall()
    with connect(world.of(DatabaseRole.OPERATE)) as operator:
        for generation in (closed, 10**9):
            with pytest.raises(psycopg.Error, match=f"generation {generation}: there is none that is open"):
                operator.execute("select create_partition(%s)", (generation,))


def test_each_row_of_the_table_is_of_something(admin: psycopg.Connection[Any]) -> None:
    functions = "select proname || '()' from pg_proc where pronamespace = 'sublet'::regnamespace"
    tables = "select relname from pg_class where relnamespace = 'sublet'::regnamespace and relkind in ('r', 'p', 'v')"
    there = {name for (name,) in admin.execute(f"{functions} union {tables}").fetchall()}
    assert {name.partition(".")[0] for name in RIGHTS} - there == set()


def test_what_has_no_row_is_found(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """And nobody may do anything with it but its owner."""
    with connect(world.owner) as owner:
        owner.execute("create function extra() returns integer language sql as 'select 1'")
        owner.execute("create table more (x integer)")
        owner.execute("grant select on more to sublet_consume")
        assert unlisted(admin) == ["extra()", "more"]
        assert set(too_much(admin)) == {PUBLIC, *DatabaseRole}, "a function is everybody's when it is made"
        make_roles(world.admin)
        assert too_much(admin) == {}
        owner.execute("drop function extra; drop table more")


@pytest.mark.parametrize(
    ("given", "to", "found"),
    [
        ("select on space", DatabaseRole.PUBLISH, DatabasePrivilege("select", "space")),
        ("update (head) on stream", DatabaseRole.APPEND, DatabasePrivilege("update", "stream", "head")),
        ("select on token", DatabaseRole.OPERATE, DatabasePrivilege("select", "token")),
        ("execute on function is_fenced", PUBLIC, DatabasePrivilege("execute", "is_fenced(text, bigint)")),
        ("usage on sequence space_space_id_seq", PUBLIC, DatabasePrivilege("usage", "space_space_id_seq")),
        ("create on schema sublet", DatabaseRole.NODE, DatabasePrivilege("create", "schema")),
    ],
)
def test_a_right_too_much_is_found(
    world: RoleWorld, admin: psycopg.Connection[Any], given: str, to: str, found: DatabasePrivilege
) -> None:
    admin.execute(f"grant {given} to {to}")
    assert found in too_much(admin)[to]
    make_roles(world.admin)
    assert too_much(admin) == {}


def test_who_looks_is_not_among_the_members(world: RoleWorld) -> None:
    """Postgres makes who makes a role without being a superuser its member."""
    with connect(world.of(DatabaseRole.NODE)) as conn:
        assert dict(list_members(conn)) == {
            role: [] if role is DatabaseRole.NODE else [f"user_of_{role}"] for role in DatabaseRole
        }


def test_owners_functions_are_the_owners(admin: psycopg.Connection[Any]) -> None:
    rows = admin.execute(
        "select proname, proowner::regrole::text, proconfig from pg_proc"
        " where pronamespace = 'sublet'::regnamespace and prosecdef"
    ).fetchall()
    assert {"append_block", "hold_epochs", "create_partition", "append_staged_blocks"} <= {name for name, *_ in rows}
    path = "search_path=sublet, pg_temp"
    configured = {name: config for name, _, config in rows if config != [path]}
    by_index = [path, "enable_seqscan=off", "enable_bitmapscan=off"]
    assert configured == {
        "append_block": by_index,
        "append_blocks": [*by_index, "plan_cache_mode=force_generic_plan"],
    }
    assert {owner for _, owner, _ in rows} == {OWNER}


# --- how they are made ------------------------------------------------------------------------------------------------


def test_what_is_printed_makes_the_roles() -> None:
    with a_role_world(migrated=False) as world, a_shell(SUBLET_DATABASE_URL=world.owner) as shell:
        migrate(world.owner)
        refused(shell.run("migrate", "--roles"), 4, "sublet_publish, sublet_append", "sublet roles --sql")
        with connect(world.admin) as admin:
            assert read_existing_roles(admin) == []
            assert done(shell.run("roles", "--json"))["roles"][0] == {
                "role": "sublet_publish",
                "exists": False,
                "members": [],
            }
            printed = shell.run("roles", "--sql").out
            for _ in range(2):
                admin.execute(printed)
                assert read_existing_roles(admin) == list(DatabaseRole)
                assert too_much(admin) == {}
            admin.execute("create role reports login; grant sublet_consume to reports")
            assert dict(list_members(admin))[DatabaseRole.CONSUME] == ["reports"]
            assert "reports" in shell.run("roles").out
            assert build_role_statements(admin, "sublet") == printed.replace(";\n", ";\0").split("\0")[:-1]
            inherits = "select pg_has_role('sublet_node', %s, 'usage'), pg_has_role('sublet_node', %s, 'member')"
            assert admin.execute(inherits, (OWNER, OWNER)).fetchone() == (False, True)
        assert done(shell.run("migrate", "--roles", "--json"))["to"] == "0104", "that the owner may"


def test_a_dump_goes_to_a_server_without_roles(world: RoleWorld, tmp_path: Path) -> None:
    """By the commands of docs/backup.md: a dump holds no roles, and theirs can be printed only once it is restored."""
    page = (REPOSITORY / "docs" / "backup.md").read_text()
    programs = find_binaries(Path("none"), None)

    def run(program: str, url: str) -> None:
        [line] = [line for line in page.splitlines() if line.startswith(f"{program} ")]
        _, *arguments = shlex.split(line)
        filled = [re.sub(r"\$\w+", lambda _: url, each) for each in arguments]
        subprocess.run([programs / program, *filled], cwd=tmp_path, check=True)

    run("pg_dump", world.owner)
    with a_role_world(migrated=False) as other, a_shell(SUBLET_DATABASE_URL=other.owner) as shell:
        run("pg_restore", other.owner)
        refused(shell.run("migrate", "--roles"), 4, "sublet_publish, sublet_append", "sublet roles --sql")
        with connect(other.admin) as admin:
            admin.execute(shell.run("roles", "--sql").out)
            assert too_much(admin) == {}
            admin.execute("create role reports login; grant sublet_consume to reports")
        assert rights(other.of("reports")).state is Severity.OK


def test_no_role_becomes_a_superuser(database: str) -> None:
    """Where a superuser has the tables, nodes are not made members of it."""
    with connect(database) as conn:
        assert not [
            line for line in build_role_statements(conn, "sublet") if line.startswith("grant") and " on" not in line
        ]


def test_roles_cannot_be_made_by_just_anybody(world: RoleWorld) -> None:
    with pytest.raises(Conflict, match=r"permission denied.*`sublet roles --sql`"):
        make_roles(world.of(DatabaseRole.NODE))


# --- doctor -----------------------------------------------------------------------------------------------------------


def rights(url: str) -> DoctorCheckResult:
    with connect(url) as conn:
        return next(found for found in run_checks(conn, 0, 1) if found.check == "rights")


@pytest.mark.parametrize("role", DatabaseRole)
def test_doctor_is_content_with_each_role(world: RoleWorld, role: DatabaseRole) -> None:
    found = rights(world.of(role))
    assert (found.state, found.hint) == (Severity.OK, None), found
    assert f"user_of_{role} is a member of {role}, and may do no more" in found.detail


def test_doctor_names_what_a_role_lacks(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    admin.execute("revoke select on block, block_1, stream, node from sublet_consume")
    admin.execute("grant select (name) on node to sublet_consume")
    admin.execute("revoke execute on function advance from sublet_consume")
    found = rights(world.of(DatabaseRole.CONSUME))
    assert found.state is Severity.ERROR
    assert "lacks execute on advance(" in found.detail
    assert "select on block, node (address, draining," in found.detail
    assert "sublet migrate --roles" in str(found.hint)
    make_roles(world.admin)
    assert rights(world.of(DatabaseRole.CONSUME)).state is Severity.OK, "the remedy is one"


def test_doctor_names_what_is_too_much(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    user = f"user_of_{DatabaseRole.APPEND}"
    admin.execute(f"grant update (position) on lending to {user}; grant insert on block, block_1 to {user}")
    found = rights(world.of(DatabaseRole.APPEND))
    assert found.state is Severity.WARNING
    assert found.detail.endswith("beyond that, insert on block, partitions of block; update on lending (position)")
    admin.execute(f"grant sublet_publish to {user}")
    assert "sublet_publish, sublet_append" in rights(world.of(DatabaseRole.APPEND)).detail
    admin.execute(f"revoke sublet_publish from {user}; revoke all on lending, block, block_1 from {user}")
    assert rights(world.of(DatabaseRole.APPEND)).state is Severity.OK


def test_doctor_names_who_may_create_in_the_schema(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """To the owner, too: what is made there can run with its rights."""
    admin.execute('create role "the baker"; create role deputy in role keeper')
    admin.execute('grant create on schema sublet to public, "the baker", deputy')
    for user in (OWNER, DatabaseRole.APPEND):
        found = rights(world.of(user))
        assert found.state is Severity.ERROR
        assert '"the baker", public may create in schema sublet' in found.detail
    admin.execute(str(found.hint).partition("says: ")[2])
    assert rights(world.owner).state is Severity.OK, "the remedy is one"
    admin.execute('drop owned by deputy; drop role deputy, "the baker"')


def test_doctor_of_a_user_without_a_role(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    assert rights(world.admin).state is Severity.OK
    assert rights(world.owner).state is Severity.OK
    admin.execute("create role loner login; grant usage on schema sublet to loner")
    try:
        lacking = rights(world.of("loner"))
        lacks = "loner is a member of no role of sublet's. For sublet_publish it lacks execute on publish("
        assert (lacking.state, lacks in lacking.detail) == (Severity.ERROR, True)
        assert 'grant sublet_publish to "loner"' in str(lacking.hint)
        admin.execute("grant execute on function advance to loner; grant select on alembic_version to loner")
        publishing = "select oid::regprocedure::text from pg_proc where proname = 'publish'"
        for (signature,) in admin.execute(publishing).fetchall():
            admin.execute(f"grant execute on function {signature} to loner")
        as_one = rights(world.of("loner"))
        has = "as a member of no role, the rights of sublet_publish, and may, beyond that,"
        assert (as_one.state, has in as_one.detail) == (Severity.WARNING, True)
    finally:
        admin.execute("drop owned by loner; drop role loner")


def test_doctor_of_a_node_that_cannot_drop(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    admin.execute(f"revoke {OWNER} from sublet_node")
    found = rights(world.of(DatabaseRole.NODE))
    assert (found.state, found.hint) == (Severity.WARNING, f"A superuser says: grant {OWNER} to sublet_node")
    admin.execute(f"grant {OWNER} to sublet_node")
    assert rights(world.of(DatabaseRole.NODE)).state is Severity.OK


@pytest.mark.conforms("X4")
def test_an_operator_writes_so_many_weights(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """By SQL too."""
    admin.execute("insert into consumer_group (kind, name, filter) values ('share', 'g', '#')")
    write = (
        "update consumer_group set desired_state = jsonb_build_object('paused', 'p', 'weights',"
        " (select jsonb_object_agg('s' || i, 1) from generate_series(1, %s) i))"
    )
    with connect(world.of(DatabaseRole.OPERATE)) as operator:
        operator.execute(write, (MAX_WEIGHTS,))
        with pytest.raises(psycopg.errors.CheckViolation):
            operator.execute(write, (MAX_WEIGHTS + 1,))
    admin.execute("delete from consumer_group")


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    "statement",
    [
        "update leadership set address = '127.0.0.1:1', node = 'n', incarnation = 'i', term = term + 1",
        "insert into leadership (leadership_id, node, incarnation, address, term, expires_at)"
        " values (7, 'n', 'i', '127.0.0.1:1', 1, now() + interval '1 hour')",
        "update node set address = '127.0.0.1:1'",
        "insert into node (name, incarnation, address, protocol_version, expires_at) values ('n', 'i', 'a', 1, now())",
        "do $$ begin lock table leadership in row exclusive mode; end $$",
    ],
)
def test_an_operator_is_nobodys_leader(world: RoleWorld, statement: LiteralString) -> None:
    """Consumers send their tokens to the address of a leader."""
    with connect(world.of(DatabaseRole.OPERATE)) as operator, pytest.raises(psycopg.errors.InsufficientPrivilege):
        operator.execute(statement)


@pytest.mark.parametrize(
    "change",
    ["stream set head = 9007199254740992", "stream set upper_frontier = '5'", "generation set opened_at = 'infinity'"],
)
def test_an_operator_only_closes_streams(world: RoleWorld, change: str) -> None:
    """A full one stopped the outbox of all spaces."""
    with connect(world.of(DatabaseRole.OPERATE)) as operator, pytest.raises(psycopg.errors.InsufficientPrivilege):
        operator.execute(f"update {change}".encode())


@pytest.mark.conforms("X6")
def test_no_role_takes_numbers_that_others_are_to_get(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """One row with the greatest number of a generation kept later streams from all groups, without a word."""
    numbered = """
    select r.rolname, attrelid::regclass::text from pg_attribute a, pg_roles r
     where attidentity <> '' and attrelid::regclass::text !~ '^pg_' and rolname like 'sublet_%%'
       and has_column_privilege(r.rolname, attrelid, attnum, 'insert')"""
    assert admin.execute(numbered).fetchall() == []
    row = "insert into generation (generation_id, space_id, ordinal, filter) overriding system value"
    with connect(world.of(DatabaseRole.OPERATE)) as operator, pytest.raises(psycopg.errors.InsufficientPrivilege):
        operator.execute(f"{row} values (9, 1, 9, 'a')")


def test_a_group_that_is_not_there_has_no_leadership(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    """Else an operator's rows would keep groups from a leader that are yet to come."""
    with connect(world.of(DatabaseRole.OPERATE)) as operator:
        operator.execute("select add_leadership(n, 1) from generate_series(100, 200) as n")
    assert admin.execute("select from leadership where leadership_id >= 100").rowcount == 0


def test_an_operator_drops_a_space_with_epochs(world: RoleWorld, admin: psycopg.Connection[Any]) -> None:
    with connect(world.of(DatabaseRole.OPERATE)) as operator:
        space = create_space(operator, "epochs", "epochs/#").space_id
        with connect(world.of(DatabaseRole.APPEND)) as publisher:
            assert hold(publisher, space, ProducerIdentity("p", 1), [(1, 2)]).least == ((1, 2),)
        drop_space(operator, "epochs")
    assert admin.execute("select lower_frontier from space where space_id = %s", (space,)).fetchone() == ([[1, 2]],)


@pytest.mark.parametrize(
    "statement",
    [
        "insert into consumer_group (kind, name, filter) values ('share', '', 'a')",
        "insert into consumer_group (kind, name, filter) values ('share', 'a/b', 'a')",
        "insert into consumer_group (kind, name, filter) values ('share', 'g', 'a#b')",
        "insert into space (name, filter, shards) values ('s', 'a/+b', 1)",
        "insert into space (name, filter, shards) values ('s', repeat('/', 128), 1)",
        "insert into generation (space_id, ordinal, filter) values (1, 999, 'a/#/b')",
        "insert into generation (space_id, ordinal, filter) values (1, 999, '')",
        "insert into generation (space_id, ordinal, filter) values (1, 999, '$a')",
        "update space set former_filters = '{#a}'",
        "update space set former_filters = '{NULL}'",
        "update space set former_filters = '{{a},{b}}'",
        "update space set retention_s = 31536000001",
        "update space set rollover_s = 0",
        "update space set payload_location = 's3://b/p', tier_after_s = 31536000001",
    ],
)
def test_an_operator_makes_no_group_that_is_none(world: RoleWorld, statement: LiteralString) -> None:
    """Nor another row that cannot be: one ended every node's reading of groups, and the lists of groups and spaces."""
    with connect(world.of(DatabaseRole.OPERATE)) as operator, pytest.raises(psycopg.errors.CheckViolation):
        operator.execute(statement)


DOUBT = '{"grant_id": 1, "start": 2, "end": 3, "hold_s": 1.5, "consumed": {"upto": 3, "least": [[1, -2], [0, 5]]}}'
NO_EPOCHS = ['"a"', "null", "{}", "[1]", "[[]]", '[["a"]]', "[[1], {}]", "[[1], [1, 2]]", "[[1.0]]", "[[1e300]]"]
NO_CONSUMED = [
    *("[]", "1", "null", "{}", '{"upto": 1}', '{"upto": "1", "least": null}', '{"upto": -1, "least": null}'),
    *('{"upto": 1e300, "least": null}', '{"upto": 1.0, "least": null}', '{"upto": 1, "least": null, "more": 1}'),
    *(f'{{"upto": 1, "least": {each}}}' for each in NO_EPOCHS if each != "null"),
]
NO_DOUBT = [
    *("[]", "1", "null", "{}"),
    *('{"grant_id": "1"}', '{"start": -1}', '{"start": 4}', '{"end": 1e300}', '{"end": 3.0}', '{"more": 1}'),
    *('{"hold_s": "z"}', '{"hold_s": -1}', '{"hold_s": 86401}', '{"hold_s": null}'),
    *(f'{{"consumed": {each}}}' for each in NO_CONSUMED if each != "null"),
]
NO_ROWS = [
    *(("space", "lower_frontier", each) for each in NO_EPOCHS),
    *(("space", "lost_upper_frontier", each) for each in NO_EPOCHS),
    *(("consumed_frontier", "least", each) for each in NO_EPOCHS if each != "null"),
    *(("lending", "consumed", each) for each in NO_CONSUMED),
    *(("lending", "in_doubt", each) for each in NO_DOUBT),
    *(("lending", "held_until", each) for each in ("infinity", "-infinity", "20000-01-01 UTC")),
    *(("stream", "hash_from", each) for each in ("-1", "NaN")),
    *(("stream", "head", each) for each in ("-1", "9007199254740993")),
    *(("stream", "hash_to", each) for each in ("18446744073709551617", "NaN")),
]


@pytest.mark.parametrize(("table", "column", "value"), NO_ROWS)
def test_an_operator_writes_no_progress_that_is_none(
    world: RoleWorld, admin: psycopg.Connection[Any], table: str, column: str, value: str
) -> None:
    """One ended the node that led its group, and then the next."""
    change = f"update {table} set {column} = %s".encode()
    if column == "in_doubt" and value.startswith("{"):
        value = json.dumps({**json.loads(DOUBT), **json.loads(value)}) if value != "{}" else value
    with admin.transaction(force_rollback=True):
        admin.execute("insert into lending (group_id, stream_id, position) values (1, 1, 0)")
        admin.execute("insert into consumed_frontier (group_id, space_id) select 1, max(space_id) from space")
        admin.execute("set local role sublet_operate")
        admin.execute("update lending set in_doubt = %s, held_until = now()", (DOUBT,))
        admin.execute("update lending set consumed = in_doubt -> 'consumed', in_doubt = null")
        admin.execute('update lending set consumed = \'{"upto": 1, "least": null}\'')
        admin.execute("update consumed_frontier set least = '[]'")
        admin.execute("update space set lower_frontier = '[[9223372036854775807]]', lost_upper_frontier = '[[1, 2]]'")
        if table == "stream":
            admin.execute("set local role sublet_node")  # an operator may not write these at all
        with pytest.raises(psycopg.errors.CheckViolation), admin.transaction():
            admin.execute(change, (value,))
