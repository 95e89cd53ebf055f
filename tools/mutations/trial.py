"""One copy of the tree and what pytest says in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tools.mutations.entries import Mutant, planted
from tools.source_path import source_path

PACKAGES = {
    "sublet": "sublet",
    "sublet_protocol": "protocol/sublet_protocol",
    "sublet_storage": "storage/sublet_storage",
    "sublet_leader": "leader/sublet_leader",
    "sublet_borrower": "borrower/sublet_borrower",
}
"""Packages of ours by import name, and their folder in a checkout."""
LIMIT_S = 900.0
"""A run of tests that takes longer is stopped and counts as broken."""

_LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", ".sublet", ".hypothesis", "__pycache__", ".*_cache", "*.egg-info", "build", "dist"
)
_MISHAPS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")


class Verdict(Enum):
    """What a run of tests has shown."""

    KILLED = "killed"  # a test failed in its body: it notices the fault
    SURVIVED = "survived"  # all tests passed: nothing notices the fault
    BROKEN = "broken"  # no test got as far as to judge


@dataclass(frozen=True, slots=True)
class Trial:
    """`detail` is the name of the test that failed, or what went wrong."""

    verdict: Verdict
    detail: str


class Copy:
    """A copy of the tree that faults are planted in, one at a time; removed on leaving the `with` block."""

    def __init__(self, root: Path) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="sublet-mutations-"))
        self.root = self._scratch / "tree"
        try:
            shutil.copytree(root, self.root, ignore=_LEFT_OUT, symlinks=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def foreign_packages(self) -> list[str]:
        """Packages of ours that Python would not take from this copy: faults planted here would prove nothing."""
        script = (
            "import importlib.util as u, json, sys\n"
            "specs = {name: u.find_spec(name) for name in sys.argv[1:]}\n"
            "print(json.dumps({n: list(s.submodule_search_locations)[0] for n, s in specs.items() if s}))\n"
        )
        mine = [name for name, folder in PACKAGES.items() if (self.root / folder).is_dir()]
        found = json.loads(self._python("-c", script, *mine).stdout)
        return [name for name in mine if Path(found.get(name, "/")).resolve() != (self.root / PACKAGES[name]).resolve()]

    def try_tests(self, selectors: Sequence[str]) -> Trial:
        """Run these tests on the copy as it is."""
        report = self._scratch / "report.xml"
        report.unlink(missing_ok=True)
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        try:
            done = self._python(*command, f"--junitxml={report}", *selectors)
        except subprocess.TimeoutExpired:
            return Trial(Verdict.BROKEN, f"the tests did not end within {LIMIT_S:.0f} s")
        return judge(done.returncode, report, done.stdout + done.stderr)

    def try_mutant(self, mutant: Mutant) -> Trial:
        """Run the mutant's tests with its fault planted; the copy is whole again afterwards."""
        file = self.root / mutant.file
        source = file.read_text(encoding="utf-8")
        file.write_text(planted(mutant, source), encoding="utf-8")
        try:
            return self.try_tests(mutant.tests)
        finally:
            file.write_text(source, encoding="utf-8")

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # No bytecode: a fault of the same length within the same second would be taken from the cache.
        environment = {**os.environ, "PYTHONPATH": source_path(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )


def judge(code: int, report: Path, output: str) -> Trial:
    """What pytest's exit code and its report together mean."""
    if code == 0:
        return Trial(Verdict.SURVIVED, "all tests passed")
    if code != 1 or not report.is_file():
        return Trial(Verdict.BROKEN, f"pytest ended with {code}: {_reason(output)}")
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        if failure is not None:
            return _judge_failure(case.get("name", "?"), failure.get("message", ""))
    return Trial(Verdict.BROKEN, "an error outside the body of a test (a fixture, or the collection)")


def _judge_failure(test: str, message: str) -> Trial:
    if message.startswith(_MISHAPS):
        return Trial(Verdict.BROKEN, f"{test}: {message.splitlines()[0]}")
    return Trial(Verdict.KILLED, test)


def _reason(output: str) -> str:
    """The last error that pytest shows, or the last line it wrote."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["no output"])[-1]
