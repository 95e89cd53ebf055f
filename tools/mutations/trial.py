"""One copy of the tree, and the results of pytest in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from select import select

from tools.mutations import warm
from tools.mutations.entries import Mutant, planted
from tools.source_path import source_path

PACKAGES = {
    "sublet": "sublet",
    "sublet_protocol": "protocol/sublet_protocol",
    "sublet_storage": "storage/sublet_storage",
    "sublet_leader": "leader/sublet_leader",
    "sublet_borrower": "borrower/sublet_borrower",
}
"""Our packages by import name, with their folder in a checkout."""
LIMIT_S = 900.0
"""A test run that takes longer is stopped and counts as broken."""

_LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", ".sublet", ".hypothesis", "__pycache__", ".*_cache", "*.egg-info", "build", "dist"
)
_MISHAP = re.compile(
    r'(?:failed on setup with ")?[\w.]*\b(?:NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError'
    r"|IndentationError)\b"
)


class Verdict(Enum):
    """Result of a test run."""

    KILLED = "killed"  # a test failed in its body: it notices the fault
    SURVIVED = "survived"  # all tests passed: nothing notices the fault
    BROKEN = "broken"  # no test got as far as an assertion


@dataclass(frozen=True, slots=True)
class Trial:
    """Result with `detail`: the test that failed, as pytest takes it, or what went wrong."""

    verdict: Verdict
    detail: str


class Copy:
    """Copy of the tree for planting one fault at a time; removed at the end of the `with` block."""

    def __init__(self, root: Path) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="sublet-mutations-"))
        self.root = self._scratch / "tree"
        self._seconds = count(1)
        self._warm: subprocess.Popen[bytes] | None = None
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
        """Remove the copy, and end what runs on it."""
        if self._warm is not None:
            self._warm.communicate()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def foreign_packages(self) -> list[str]:
        """Return those of our packages that Python would not import from this copy: faults planted here would not
        run."""
        script = (
            "import importlib.util as u, json, sys\n"
            "specs = {name: u.find_spec(name) for name in sys.argv[1:]}\n"
            "print(json.dumps({n: list(s.submodule_search_locations)[0] for n, s in specs.items() if s}))\n"
        )
        mine = [name for name, folder in PACKAGES.items() if (self.root / folder).is_dir()]
        with self._python("-c", script, *mine) as process:
            found = json.loads(process.communicate()[0])
        return [name for name in mine if Path(found.get(name, "/")).resolve() != (self.root / PACKAGES[name]).resolve()]

    def try_tests(
        self,
        selectors: Sequence[str],
        *options: str,
        limit_s: float = LIMIT_S,
        is_red_enough: bool = False,
        **environment: str,
    ) -> Trial:
        """Run these tests on the copy as it is. With `is_red_enough` a hang and an error in a fixture count as
        failures, and tests that pytest stopped at its time limit do not."""
        report, output = self._scratch / "report.xml", self._scratch / "output"
        for file in (report, output):
            file.unlink(missing_ok=True)
        command = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *options]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *selectors]
        code = self._pytest([str(output), environment, command], limit_s)
        if code is None:
            verdict = Verdict.KILLED if is_red_enough else Verdict.BROKEN
            return Trial(verdict, f"the tests did not end within {limit_s:.0f} s")
        return judge(code, report, output.read_text(errors="replace"), is_red_enough=is_red_enough)

    def try_mutant(self, mutant: Mutant) -> Trial:
        """Run the mutant's tests with its fault planted."""
        source = (self.root / mutant.file).read_text(encoding="utf-8")
        with self.changed(mutant.file, planted(mutant, source)):
            return self.try_tests(mutant.tests)

    @contextmanager
    def changed(self, name: str, text: str) -> Iterator[None]:
        """Give a file of the copy this text for the `with` block, and then its own again.

        Python recognises stale bytecode by size and modification second, so each text gets its own second.
        """
        file = self.root / name
        source, changed_ns = file.read_bytes(), file.stat().st_mtime_ns
        file.write_text(text, encoding="utf-8")
        os.utime(file, (0, next(self._seconds)))
        try:
            yield
        finally:
            file.write_bytes(source)
            os.utime(file, ns=(changed_ns, changed_ns))

    def _pytest(self, request: Sequence[object], limit_s: float) -> int | None:
        """Return the exit code; None if it did not end in time."""
        if self._warm is None:
            self._warm = self._python("-P", warm.__file__)
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(request).encode() + b"\n")
        pid, has_ended = int(self._warm.stdout.readline()), False
        try:
            has_ended = bool(select([self._warm.stdout], [], [], limit_s)[0])
        finally:
            if not has_ended:
                os.killpg(pid, signal.SIGKILL)  # also the processes that the tests have started
        code = int(self._warm.stdout.readline())
        return code if has_ended else None

    def _python(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Return a process of Python that imports from the copy."""
        own = {"PYTHONPATH": source_path(self.root), "PYTHONDONTWRITEBYTECODE": ""}
        return subprocess.Popen(
            [sys.executable, *arguments],
            bufsize=0,
            cwd=self.root,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )


def judge(code: int, report: Path, output: str, *, is_red_enough: bool = False) -> Trial:
    """Return the result from pytest's exit code and its report."""
    if code == 0 or (code == 5 and is_red_enough):
        return Trial(Verdict.SURVIVED, "all tests passed")
    if code != 1 or not report.is_file():
        return Trial(Verdict.BROKEN, f"pytest ended with {code}: {_reason(output)}")
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error") if is_red_enough else ("failure",):
            failure = case.find(kind)
            if failure is not None:
                return _judge_failure(_selector(case), failure.get("message", ""))
    if is_red_enough:
        return Trial(Verdict.SURVIVED, "the tests that there was time for passed")
    return Trial(Verdict.BROKEN, "an error outside the body of a test (a fixture, or the collection)")


def _selector(case: ElementTree.Element) -> str:
    file, name = case.get("file", "?"), case.get("name", "?")
    classes = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *filter(None, classes.split(".")), name])


def _judge_failure(test: str, message: str) -> Trial:
    if _MISHAP.match(message):
        return Trial(Verdict.BROKEN, f"{test}: {message.splitlines()[0]}")
    return Trial(Verdict.KILLED, test)


def _reason(output: str) -> str:
    """Return the last error that pytest shows, or the last line it wrote."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["no output"])[-1]
