"""A data directory, and all on the way to it, is ours and the server's user's: what others can replace is refused."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from sublet_protocol.domain.errors import EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded import EmbeddedPostgres, find_usable_data_dir
from sublet_storage.bootstrap.embedded.data_directory_and_user import (
    PostgresOsUser,
    choose_socket_directory,
    find_inaccessible,
    find_server_user,
)
from sublet_storage.bootstrap.embedded.trusted_path import give_to, make_private_directory, open_directory, open_file
from tests.kit import for_root

pytestmark = pytest.mark.conforms("X9")

STRANGER = 54_321
"""A user id that nobody has."""


@pytest.fixture
def home(server_home: Path) -> Path:
    return server_home


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_directory_others_may_write_to_is_refused(home: Path, mode: int) -> None:
    """Also above the data directory; a sticky one is no danger to what lies in it."""
    shared = home / "shared"
    shared.mkdir()
    shared.chmod(mode)
    for data_dir in (shared, shared / "data"):
        with pytest.raises(EmbeddedDirectoryUnusable, match=f"{shared} can be written by other users. Run `chmod go-w"):
            EmbeddedPostgres(data_dir).start()
    assert not list(shared.iterdir())
    shared.chmod(0o1777)
    find_server_user(shared / "data")
    with pytest.raises(EmbeddedDirectoryUnusable, match="can be written by other users"):
        find_server_user(shared)


def test_a_group_with_others_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no member but the owner is not."""
    shared = home / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    find_server_user(shared)
    if os.geteuid() == 0:
        os.chown(shared, -1, pwd.getpwnam("daemon").pw_gid)
        with pytest.raises(EmbeddedDirectoryUnusable, match=f"{shared} can be written by other users"):
            find_server_user(shared)
        shared.chmod(0o755)
        find_server_user(shared)


def test_anothers_cluster_is_not_ours(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its directory exchanged for another, as root's is."""
    (home / ".sublet" / "pg").mkdir(parents=True)
    (home / ".sublet" / "pg" / "PG_VERSION").touch()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.chdir(home)
    with pytest.raises(EmbeddedDirectoryUnusable, match=r"belongs to user \S+. Run as that user, or choose"):
        find_server_user(find_usable_data_dir())
    assert find_server_user(home / "new") is None
    if os.getuid() == 0:
        os.chown(home / ".sublet" / "pg", STRANGER, -1)
        assert find_server_user(home / ".sublet") is None


@for_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_closed"),
    [
        (STRANGER, 0, 0o700, False), (STRANGER, 0, 0o677, True),
        (0, STRANGER, 0o710, False), (0, STRANGER, 0o767, True),
        (0, STRANGER + 1, 0o710, False), (0, STRANGER + 1, 0o767, True),
        (0, 0, 0o701, False), (0, 0, 0o776, True),
    ],
)  # fmt: skip
def test_a_user_enters_by_its_own_bit(home: Path, owner: int, group: int, mode: int, is_closed: bool) -> None:
    """That of its user id, of one of its groups, or that of all others."""
    user = PostgresOsUser("stranger", STRANGER, STRANGER, (STRANGER, STRANGER + 1))
    directory = home / "directory"
    directory.mkdir()
    os.chown(directory, owner, group)
    directory.chmod(mode)
    assert find_inaccessible(user, directory / "deeper") == (directory if is_closed else None)


@for_root
def test_without_an_account_it_is_said_what_to_create(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nobody(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", find_nobody)
    with pytest.raises(EmbeddedDirectoryUnusable, match="neither a user `postgres` nor `nobody` exists"):
        find_server_user(home / "data")


@for_root
@pytest.mark.parametrize(("owner", "mode"), [(STRANGER, 0o700), (0, 0o755), (0, 0o770)])
def test_anothers_directory_is_not_a_private_one(home: Path, owner: int, mode: int) -> None:
    there = home / "sockets"
    there.mkdir()
    there.chmod(mode)
    os.chown(there, owner, -1)
    with pytest.raises(FileExistsError, match=rf"belongs to .*, with the mode {mode:o}. Remove it"):
        make_private_directory(there, 0, 0)
    there.rmdir()
    for _ in range(2):
        make_private_directory(there, STRANGER, STRANGER)
    assert (there.stat().st_uid, stat.S_IMODE(there.stat().st_mode)) == (STRANGER, 0o700)


def test_a_socket_has_no_longer_path_than_may_be(home: Path) -> None:
    """One of 103 bytes, and a byte for its end."""
    rest = 103 - len(str(home / "_" / "socket" / ".s.PGSQL.5432"))
    for length, is_inside in ((rest + 1, True), (rest + 2, False)):
        data_dir = home / ("d" * length)
        data_dir.mkdir()
        directory = choose_socket_directory(data_dir, None)
        assert (directory == data_dir / "socket") is is_inside
        directory.rmdir()


@for_root
@pytest.mark.parametrize("is_link", [False, True], ids=["directory", "link"])
def test_a_default_directory_of_others_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool) -> None:
    """Where anybody may create the default directory; one that is named is meant."""
    home.chmod(0o1777)
    monkeypatch.chdir(home)
    monkeypatch.delenv("SUBLET_DATA_DIR", raising=False)
    assert find_usable_data_dir() == home / ".sublet"
    planted = home / ".sublet"
    if is_link:
        (home / "elsewhere").mkdir()
        planted.symlink_to("elsewhere")
    else:
        planted.mkdir()
    assert find_usable_data_dir() == planted.resolve()
    os.chown(planted, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(EmbeddedDirectoryUnusable, match=f"has put it into {home}, where everybody may. Name it"):
        find_usable_data_dir()
    home.chmod(0o755)
    assert find_usable_data_dir().is_absolute(), "here nobody else can have put it"
    monkeypatch.setenv("SUBLET_DATA_DIR", str(planted))
    assert find_usable_data_dir() == planted.resolve()


@for_root
def test_a_strangers_directory_is_refused(home: Path) -> None:
    foreign = home / "foreign"
    (foreign / "data").mkdir(parents=True)
    os.chown(foreign, STRANGER, STRANGER)
    with pytest.raises(EmbeddedDirectoryUnusable, match=f"{foreign} belongs to {STRANGER}, who could replace"):
        find_server_user(foreign / "data")


@pytest.mark.parametrize("name", ["users.lock", "server.lock", "pg", "socket"])
def test_a_link_in_the_data_directory_is_refused(home: Path, name: str) -> None:
    data_dir, aim = home / "data", home / "aim"
    data_dir.mkdir()
    (aim.mkdir if name in ("pg", "socket") else aim.touch)(0o700)
    (data_dir / name).symlink_to(aim)
    before = aim.stat()
    with pytest.raises(EmbeddedDirectoryUnusable, match=f"{data_dir / name} is a symbolic link"):
        EmbeddedPostgres(data_dir).start()
    assert (before.st_uid, before.st_mode, before.st_size) == (aim.stat().st_uid, aim.stat().st_mode, before.st_size)


def test_a_file_with_two_names_is_refused(home: Path) -> None:
    data_dir = home / "data"
    data_dir.mkdir()
    (home / "aim").touch()
    (data_dir / "server.lock").hardlink_to(home / "aim")
    with pytest.raises(EmbeddedDirectoryUnusable, match=r"server.lock is no plain file, or has a second name"):
        EmbeddedPostgres(data_dir).start()


def test_no_link_is_followed_on_the_way(home: Path) -> None:
    (home / "real" / "data").mkdir(parents=True)
    (home / "link").symlink_to(home / "real")
    for use in (
        lambda path: open_directory(path, ()),
        lambda path: open_file(path / "file", os.O_RDWR | os.O_CREAT, ()),
        lambda path: make_private_directory(path / "socket", os.geteuid(), os.getegid()),
    ):
        with pytest.raises(PermissionError, match=f"{home / 'link'} is a symbolic link"):
            use(home / "link" / "data")
    assert not list((home / "real" / "data").iterdir())


@for_root
def test_nothing_of_others_is_handed_over(home: Path) -> None:
    owner = pwd.getpwnam("nobody")
    mine, link, foreign = home / "mine", home / "link", home / "foreign"
    mine.mkdir()
    foreign.mkdir()
    link.symlink_to(mine)
    os.chown(foreign, STRANGER, STRANGER)
    for refused in (link, foreign):
        with pytest.raises(OSError):  # noqa: PT011 of the system, or ours
            give_to(refused, owner.pw_uid, owner.pw_gid)
    assert (mine.stat().st_uid, foreign.stat().st_uid) == (0, STRANGER)
    give_to(mine, owner.pw_uid, owner.pw_gid)
    assert mine.stat().st_uid == owner.pw_uid


def test_only_plain_files_are_handed_over(home: Path) -> None:
    plain, pipe, link, linked = (home / name for name in ("plain", "pipe", "link", "linked"))
    plain.touch()
    os.mkfifo(pipe)
    link.symlink_to(plain)
    linked.touch()
    (home / "second").hardlink_to(linked)
    me = os.geteuid(), os.getegid()
    for path in (pipe, linked, Path("/dev/null")):
        with pytest.raises(PermissionError, match=f"{path} is no plain file or directory, or has a second name"):
            give_to(path, *me)
    with pytest.raises(PermissionError, match=f"{link} is a symbolic link"):
        give_to(link, *me)
    give_to(plain, *me)
    give_to(home, *me)


def test_a_name_that_is_not_utf8_is_refused(server_home: Path) -> None:
    for name in (os.fsdecode(b"\xff"), "\ud800", "\udfff"):
        with pytest.raises(EmbeddedDirectoryUnusable, match="its name is not UTF-8"):
            find_server_user(server_home / name)
