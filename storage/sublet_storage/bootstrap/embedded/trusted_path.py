"""Opens files and directories that no other user can have replaced.

The directories on the way are opened one by one, links are not followed, and each must belong to root, to us or to the
server's user, and be writable by no other user; in a sticky one, such as /tmp, others cannot replace what is ours. So
what was checked is what is used. All raise `PermissionError`, whose text names the path, what is wrong and a hint.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Collection
from functools import cache
from pathlib import Path

_OPEN_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: Path, owners: Collection[int], *, make: bool = False, is_shared: bool = False) -> int:
    """Return a descriptor of an absolute path, for `dir_fd`. `owners`: user ids beside root's and our own. `make`: what
    is missing, accessible for all. `is_shared`: others may write to it, if it is sticky.

    Raise `FileNotFoundError` too, and other `OSError`.
    """
    descriptor, so_far = os.open("/", _OPEN_FLAGS), Path("/")
    try:
        for part in path.parts[1:]:
            _check(so_far, os.fstat(descriptor), owners, is_shared=True)
            so_far /= part
            try:
                child = _open_or_make(part, descriptor) if make else os.open(part, _OPEN_FLAGS, dir_fd=descriptor)
            except OSError as error:
                raise _link_error(so_far, error) from None
            os.close(descriptor)
            descriptor = child
        _check(so_far, os.fstat(descriptor), owners, is_shared=is_shared)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_directory(path: Path, owners: Collection[int] = ()) -> None:
    """Check it, and the way to it, as far as it exists."""
    for each in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_directory(each, owners, is_shared=each != path))
            return


def open_file(path: Path, flags: int, owners: Collection[int]) -> int:
    """Return a descriptor of a plain file, which has no second name and only these owners."""
    directory = open_directory(path.parent, owners)
    try:
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError as error:
        raise _link_error(path, error) from None
    finally:
        os.close(directory)
    status = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise PermissionError(f"{path} is no plain file, or has a second name. Remove it")
        _check(path, status, owners)
    except PermissionError:
        os.close(descriptor)
        raise
    return descriptor


def make_private_directory(path: Path, uid: int, gid: int) -> None:
    """Ensure that there is a directory that only this user can access. Raise `FileExistsError` for another one."""
    parent = open_directory(path.parent, (uid,), is_shared=True)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=parent)
        directory = os.open(path.name, _DIRECTORY, dir_fd=parent)
    except OSError as error:
        raise _link_error(path, error) from None
    finally:
        os.close(parent)
    try:
        status = os.fstat(directory)
        if status.st_uid not in (uid, os.geteuid()) or stat.S_IMODE(status.st_mode) != 0o700:
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            raise FileExistsError(f"{path} belongs to {find_user_name(status.st_uid)}, with the mode {mode}. Remove it")
        if status.st_uid != uid:
            os.fchown(directory, uid, gid)
    finally:
        os.close(directory)


def give_to(path: Path, uid: int, gid: int) -> None:
    """Change the owner of a plain file or a directory of ours. Others are rejected: another user's, links, files with a
    second name, pipes, sockets and devices."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _link_error(path, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1):
            raise PermissionError(f"{path} is no plain file or directory, or has a second name. Remove it")
        if status.st_uid not in (uid, os.geteuid()):
            raise PermissionError(f"{path} is somebody else's. Remove it")
        os.fchown(descriptor, uid, gid)
    finally:
        os.close(descriptor)


def find_user_name(uid: int) -> str:
    """Return a user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _open_or_make(part: str, parent: int) -> int:
    """Open a directory, and return its descriptor; one that is missing is made, accessible for all, whatever the
    umask."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(part, _OPEN_FLAGS, dir_fd=parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, 0o755, dir_fd=parent)
    descriptor = os.open(part, _DIRECTORY, dir_fd=parent)
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, 0o755)
    return descriptor


def _check(path: Path, status: os.stat_result, owners: Collection[int], *, is_shared: bool = False) -> None:
    if status.st_uid not in {0, os.geteuid(), *owners}:
        raise PermissionError(f"{path} belongs to {find_user_name(status.st_uid)}, who could replace what is in it")
    if is_shared and status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid)
    ):
        raise PermissionError(f"{path} can be written by other users. Run `chmod go-w {path}`")


@cache
def _is_private_group(gid: int, uid: int) -> bool:
    """Return whether a group has no member but this user and root: many systems give each user a group, and the group
    write permission."""
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return False
    members |= {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid}
    return members <= {find_user_name(uid), find_user_name(0)}


def _link_error(path: Path, error: OSError) -> OSError:
    """Return an error that names a link, as the system's does not; others as they are, with the path."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return PermissionError(f"{path} is a symbolic link, or no directory. Name what it leads to, or remove it")
    return OSError(error.errno, error.strerror, str(path))
