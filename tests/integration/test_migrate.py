"""Schema versions: made, checked, refused, dropped; and found by an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from sublet_protocol.domain.errors import Conflict, DatabaseUnreachable, InvalidSetting, SchemaMismatch
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.bootstrap.migrate import current_version, downgrade, latest_version, make_roles, migrate
from sublet_storage.db.connect import SCHEMA_VERSION, check_schema, connect
from sublet_storage.spaces.space_changes import create_space

REPOSITORY = Path(__file__).parents[2]


def tables(url: str) -> set[str]:
    with psycopg.connect(url) as conn:
        found = conn.execute(
            "select relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
            " where relkind in ('r', 'p') and nspname !~ '^(pg_|information_schema)'"
        )
        return {row[0] for row in found}


def test_an_empty_database_gets_its_tables(empty_database: str) -> None:
    assert current_version(empty_database) is None
    downgrade(empty_database)
    assert tables(empty_database) == set(), "there was nothing to drop"
    assert migrate(empty_database) == latest_version() == SCHEMA_VERSION == current_version(empty_database)
    with connect(empty_database) as conn:
        assert conn.execute("select name, filter, shards from space").fetchall() == [("default", "#", 16)]
        assert conn.execute("select count(*), min(hash_from), max(hash_to) from stream").fetchone() == (16, 0, 1 << 64)
        assert conn.execute("select count(*), min(state) from generation").fetchone() == (1, "open")
        check_schema(conn)


@pytest.mark.parametrize("name", ["space", "lending"])
def test_a_table_of_another_user_is_left_alone(empty_database: str, name: str) -> None:
    """And nothing is left of those that were made before it."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(f"create schema sublet create table {name} (what text)")
    with pytest.raises(SchemaMismatch, match=f'relation "{name}" already exists, and is none of sublet') as refused:
        migrate(empty_database)
    assert "SUBLET_SCHEMA" in str(refused.value)
    assert tables(empty_database) == {name}


def test_migrating_again_changes_nothing(database: str) -> None:
    with connect(database) as conn:
        conn.execute("update space set shards = 7")
        assert migrate(database) == SCHEMA_VERSION
        assert conn.execute("select shards from space").fetchall() == [(7,)]


def test_a_migration_that_was_cut_short_is_completed(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr("sublet_storage.bootstrap.migrate.ensure_default", interrupt)
        with pytest.raises(KeyboardInterrupt):
            migrate(empty_database)
    assert current_version(empty_database) == SCHEMA_VERSION
    assert migrate(empty_database) == SCHEMA_VERSION
    with connect(empty_database) as conn:
        assert conn.execute("select name from space").fetchall() == [("default",)]


def test_everybody_may_migrate_at_once(empty_database: str) -> None:
    story = f"from sublet_storage.bootstrap.migrate import migrate; migrate({empty_database!r})"
    processes = [subprocess.Popen([sys.executable, "-c", story], cwd=REPOSITORY) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(migrate, [empty_database] * 2)) == {SCHEMA_VERSION}
    assert [process.wait(60) for process in processes] == [0, 0]
    with connect(empty_database) as conn:
        assert conn.execute("select count(*) from space").fetchone() == (1,)


def test_schemas_of_one_database_are_strangers(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_SCHEMA", "second")
    assert current_version(database) is None
    migrate(database)
    with connect(database) as conn:
        conn.execute("update space set shards = 3")
        check_schema(conn)
    downgrade(database)
    assert current_version(database) is None
    with connect(database, schema="sublet") as conn:
        check_schema(conn)
        assert conn.execute("select shards from space").fetchall() == [(16,)]


def test_downgrade_leaves_nothing_behind(database: str) -> None:
    downgrade(database)
    assert tables(database) == {"alembic_version"}
    with connect(database) as conn:
        functions = conn.execute("select count(*) from pg_proc where pronamespace = 'sublet'::regnamespace").fetchone()
        types = conn.execute("select count(*) from pg_type where typnamespace = 'sublet'::regnamespace").fetchone()
    assert functions == (0,)
    assert types == (2,), "alembic_version has a row type and an array type; there is another"
    assert migrate(database) == SCHEMA_VERSION


OPEN = """
select 'function ' || p.oid::regprocedure
  from pg_proc p cross join aclexplode(coalesce(proacl, acldefault('f', proowner))) a
 where pronamespace = 'sublet'::regnamespace and a.grantee = 0
union all
select relkind::text || ' ' || relname
  from pg_class cross join aclexplode(coalesce(relacl, acldefault('r', relowner))) a
 where relnamespace = 'sublet'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'S') and a.grantee = 0"""
"""What PUBLIC may do anything with."""


@pytest.mark.conforms("X6")
def test_nothing_is_for_everybody(empty_database: str) -> None:
    """Also where the database gives all that is made to everybody, and of partitions that are made later."""
    with connect(empty_database) as conn:
        conn.execute("create schema sublet")
        for where in ("", "in schema sublet"):
            for things in ("tables", "sequences", "routines"):
                conn.execute(f"alter default privileges {where} grant all on {things} to public")
        migrate(empty_database)
        assert conn.execute(OPEN).fetchall() == []
        create_space(conn, "more", "more/#")
        assert conn.execute("select count(*) > 1 from generation").fetchone() == (True,)
        assert conn.execute(OPEN).fetchall() == []
        conn.execute("grant select on space to public")
        conn.execute("grant execute on function timeline_now to public")
        assert len(conn.execute(OPEN).fetchall()) == 2, "it is seen"
        downgrade(empty_database)
        assert conn.execute(OPEN).fetchall() == []
        migrate(empty_database)
        assert conn.execute(OPEN).fetchall() == []


@pytest.mark.conforms("X6")
def test_a_schema_open_to_public_is_refused(empty_database: str) -> None:
    """Whether or not it has the tables, and before anything in it is run; who revokes that may migrate."""
    with connect(empty_database) as conn:
        conn.execute("create schema sublet create view alembic_version as select 1 / 0 as version_num")
        conn.execute("grant create on schema sublet to public")
        with pytest.raises(Conflict, match="PUBLIC"):
            migrate(empty_database)
        conn.execute("drop view alembic_version")
        for attempt in (migrate, make_roles):
            conn.execute("grant create on schema sublet to public")
            with pytest.raises(Conflict, match=r'PUBLIC, .* may create .*revoke create on schema "sublet" from public'):
                attempt(empty_database)
            conn.execute("revoke create on schema sublet from public")
            migrate(empty_database)


OLDER = "of before the first release, 0101"


@pytest.mark.parametrize(
    ("version", "story", "untouched"),
    [
        ("0003", rf"at version 0003, {OLDER}: .*`drop schema ... cascade`.*`sublet migrate`", f"{OLDER}.*Make it anew"),
        ("0100", rf"at version 0100, {OLDER}: .*`drop schema ... cascade`.*`sublet migrate`", f"{OLDER}.*Make it anew"),
        ("0999", r"0999, newer than .*Upgrade sublet here", "0999, newer than"),
    ],
    ids=["0003", "0100", "0999"],
)
def test_an_older_or_newer_database_is_refused(database: str, version: str, story: str, untouched: str) -> None:
    """And `migrate` and `downgrade` leave it alone."""
    with connect(database) as conn:
        conn.execute("update alembic_version set version_num = %s, compatible_from = null", (version,))
        with pytest.raises(SchemaMismatch, match=story):
            check_schema(conn)
    with pytest.raises(SchemaMismatch, match=story), open_database(database):
        pass
    before = tables(database)
    for attempt in (migrate, downgrade):
        with pytest.raises(SchemaMismatch, match=untouched):
            attempt(database)
    assert tables(database) == before


def test_a_given_database_is_checked_and_not_migrated(empty_database: str, database: str) -> None:
    asks_for_migrate = r"'sublet'.*has no sublet tables.*Run `sublet migrate`"
    with pytest.raises(SchemaMismatch, match=asks_for_migrate), open_database(empty_database):
        pass
    assert tables(empty_database) == set()
    with open_database(database) as opened:
        assert opened.url.reveal() == database
        assert opened.data_dir is None
    with pytest.raises(DatabaseUnreachable), open_database("postgresql://localhost:1/none"):
        pass
    with pytest.raises(InvalidSetting, match="both"), open_database(database, data_dir="here"):
        pass


def test_the_embedded_server_migrates_itself_and_stops(
    database: str, server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used where a directory is named, or nothing in the environment names a database."""
    monkeypatch.setenv("SUBLET_DATABASE_URL", database)
    with open_database() as opened:
        assert opened.url.reveal() == database
    with open_database(data_dir=server_home / "data") as opened:
        assert opened.data_dir is not None
    monkeypatch.delenv("SUBLET_DATABASE_URL")
    monkeypatch.setenv("SUBLET_DATA_DIR", str(server_home / "data"))
    with open_database() as opened, connect(opened.url) as conn:
        assert opened.data_dir is not None
        assert opened.data_dir == server_home / "data"
        check_schema(conn)
    with pytest.raises(DatabaseUnreachable):
        connect(opened.url)


@pytest.mark.long
def test_an_installed_wheel_finds_its_migrations(empty_database: str, tmp_path: Path) -> None:
    """Built without a network by the hatchling that is here; installed beside the libraries that are here."""
    build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    fresh = tmp_path / "venv"
    venv.create(fresh, with_pip=False, symlinks=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", fresh / "bin" / "python", "install", "--quiet", "--no-deps", wheel],
        check=True,
    )
    for folder in {Path(str(psycopg.__file__)).parents[1], Path(str(pytest.__file__)).parents[1]}:
        with (site / "libraries.pth").open("a") as libraries:
            libraries.write(f"{folder}\n")
    story = (
        "import sublet_storage.bootstrap.migrate as m; from pathlib import Path; import sys\n"
        "assert Path(m.__file__).is_relative_to(sys.prefix), m.__file__\n"
        "assert m.scripts_path().name == '_migrations', m.scripts_path()\n"
        f"assert m.migrate({empty_database!r}) == {SCHEMA_VERSION!r}"
    )
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([fresh / "bin" / "python", "-c", story], cwd=tmp_path, env=bare, check=True)
    with connect(empty_database) as conn:
        check_schema(conn)
