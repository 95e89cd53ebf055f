"""A grant's key is shown nowhere, and handed on to processes of the same user alone."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet_borrower.planner.grant_key_files import GrantKeyHandoffFile, PlannerGrantKeys, read_grant_keys
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups.consumer_progress import SessionIdentity

pytestmark = pytest.mark.conforms("X3", "X5")

SHARE = "$share/g/#"
ETL = SessionIdentity("etl", 7)


def grant(stream_id: int, grant_id: int) -> Grant:
    return Grant("a/1", 1, stream_id, grant_id, 0, 1, 0, 1, "#", grant_key=GrantSecret.draw())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"sublet-{os.getuid()}"


@pytest.fixture
def file() -> Iterator[GrantKeyHandoffFile]:
    file = GrantKeyHandoffFile(SHARE, ETL)
    yield file
    file.close()


def test_a_key_shows_as_stars() -> None:
    message = grant(7, 50)
    key = message.grant_key
    for shown in (repr(key), str(key), f"{key}", f"{key!r:>3}", "%s" % key, repr(message)):  # noqa: UP031
        assert key.reveal().hex() not in shown
        assert repr(key.reveal()) not in shown
    assert f"{key}" == "***"
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            copied(key)
    with pytest.raises(TypeError):
        json.dumps(key)


def test_keys_are_equal_by_their_bytes() -> None:
    assert GrantSecret(bytes(16)) == GrantSecret(bytes(16))
    assert GrantSecret(bytes(16)) != GrantSecret.draw()
    assert GrantSecret(bytes(16)) != bytes(16)
    assert len({GrantSecret.draw() for _ in range(100)} | {GrantSecret(bytes(16)), GrantSecret(bytes(16))}) == 101


def test_a_planner_hands_its_keys_on(file: GrantKeyHandoffFile) -> None:
    first, second = grant(7, 50), grant(8, 60)
    file.add(first)
    file.add(second)
    keys = {(7, 50): first.grant_key, (8, 60): second.grant_key}
    assert read_grant_keys(SHARE, "etl") == [PlannerGrantKeys(ETL, keys)]
    assert read_grant_keys(SHARE, "other") == read_grant_keys("$share/h/#", "etl") == []
    newer = GrantKeyHandoffFile(SHARE, SessionIdentity("etl", 9))
    assert [one.session.epoch for one in read_grant_keys(SHARE, "etl")] == [9, 7], "the newest first"
    newer.close()
    assert [one.session.epoch for one in read_grant_keys(SHARE, "etl")] == [7]


def test_keys_of_earlier_grants_are_dropped(file: GrantKeyHandoffFile, folder: Path) -> None:
    """The last of each stream stays, in a file that is locked as before."""
    for grant_id in range(50, 100):
        file.add(grant(8, grant_id))
        file.add(grant(7, grant_id))
    (of_last,) = read_grant_keys(SHARE, "etl")
    assert {(7, 99), (8, 99)} <= of_last.keys.keys()
    assert len(of_last.keys) <= 4
    GrantKeyHandoffFile(SHARE, SessionIdentity("etl", 9)).close()
    assert read_grant_keys(SHARE, "etl") == [of_last]
    assert len(list(folder.iterdir())) == 1


def test_a_failed_rewrite_is_made_up_for(file: GrantKeyHandoffFile, folder: Path) -> None:
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for grant_id in range(50, 55):
        with contextlib.suppress(IsADirectoryError):
            file.add(grant(7, grant_id))
    assert (len(os.listdir("/proc/self/fd")), [*folder.iterdir()]) == (before, [path])
    path.rmdir()
    file.add(grant(7, 55))
    (of_last,) = read_grant_keys(SHARE, "etl")
    assert of_last.keys.keys() == {(7, 55)}


def test_a_key_cut_by_a_full_disk_is_made_up_for(file: GrantKeyHandoffFile, folder: Path) -> None:
    """With the next; a file that cannot be begun is not left there."""
    file.add(grant(7, 50))
    (path,) = folder.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                file.add(grant(8, 60))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            GrantKeyHandoffFile(SHARE, ETL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [keys.keys.keys() for keys in read_grant_keys(SHARE, "etl")] == [{(7, 50)}]
    file.add(grant(9, 70))
    assert [keys.keys.keys() for keys in read_grant_keys(SHARE, "etl")] == [{(7, 50), (8, 60), (9, 70)}]


def test_a_key_that_is_being_written_is_not_read(file: GrantKeyHandoffFile, folder: Path) -> None:
    file.add(grant(7, 50))
    (path,) = folder.iterdir()
    entire = path.read_bytes()
    for length in range(len(b"7\n"), len(entire)):
        path.write_bytes(entire[:length])
        assert read_grant_keys(SHARE, "etl") == [PlannerGrantKeys(ETL, {})]


def test_a_dead_planners_keys_are_removed(file: GrantKeyHandoffFile, folder: Path) -> None:
    """By the next planner of the session; a living one's stay."""
    story = (
        "import os, tempfile; tempfile.tempdir = {!r}\n"
        "from sublet_borrower.planner.grant_key_files import GrantKeyHandoffFile\n"
        "from sublet_storage.groups.consumer_progress import SessionIdentity\n"
        "GrantKeyHandoffFile('$share/g/#', SessionIdentity('etl', 8)); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", story.format(str(folder.parent))], check=True)
    assert [one.session.epoch for one in read_grant_keys(SHARE, "etl")] == [8, 7]
    (folder / f"new.{next(folder.iterdir()).name}").touch()
    GrantKeyHandoffFile(SHARE, SessionIdentity("etl", 9)).close()
    assert [one.session.epoch for one in read_grant_keys(SHARE, "etl")] == [7]
    assert len(list(folder.iterdir())) == 1
    file.add(grant(7, 50))


def test_the_files_are_their_users_alone(file: GrantKeyHandoffFile, folder: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700, 0o600}
    folder.chmod(0o750)
    with pytest.raises(InvalidSetting, match="must be this user's alone"):
        read_grant_keys(SHARE, "etl")
    with pytest.raises(InvalidSetting, match=f"chmod 700 {folder}"):
        GrantKeyHandoffFile(SHARE, ETL)


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidSetting, match="another user made it"):
        GrantKeyHandoffFile(SHARE, ETL)
    assert not list((tmp_path / "elsewhere").iterdir())
