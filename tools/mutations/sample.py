"""Faults that nobody has thought of: some of all places, by a seed, and the tests that could see each.

Each kind has the same share of a sample. The nearest tests are run first, then the others that are near, each time from
the cheap to the dear until one is red. What is red with the fault must be so twice, and green without it, or it proves
nothing.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.mutations.places import KINDS, Fault, find_faults
from tools.mutations.trial import PACKAGES, Copy, Trial, Verdict
from tools.source_path import FOLDERS

PRODUCT = (*PACKAGES.values(), "borrower/pyspark_sublet", "migrations/sql")
FOLDER_REACH = (
    ("unit|scenarios", 3),
    ("contract|interleavings", 3),
    ("property", 3),
    ("simulation", 6),
    ("integration", 3),
    ("spark", 3),
)
"""Folders of tests, from the cheap to the dear; and how many imports away a test is near: it counts too if it names the
function or is called like the file."""
RUN_S = 600.0
"""No test of a run begins later."""
HANG_S = 900.0
"""A run that has not ended by then is stuck."""
MOST_FILES = 15
"""Of a folder: the nearest."""
NEAREST = 2
"""So many of each folder come first."""
SEEDS = "100"
"""Of the simulator, fewer than in `make test`."""
TOLERATED = 0.1
"""Such a share of a sample may survive: some faults change nothing that anybody could see."""

UNSEEN = Trial(Verdict.SURVIVED, "no test is red")


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Return so many faults of the product, each kind in turn, the same for the same seed and sources."""
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for path in _sources(root, PRODUCT):
        name = path.relative_to(root).as_posix()
        if "_pb2" not in name and "/demo/" not in name:
            for fault in find_faults(name, path.read_text(encoding="utf-8")):
                by_kind[fault.kind].append(fault)
    chance = random.Random(seed)
    piles = [chance.sample(by_kind[kind], len(by_kind[kind])) for kind in KINDS]
    drawn: list[Fault] = []
    while any(piles) and len(drawn) < count:
        drawn += [pile.pop() for pile in piles if pile][: count - len(drawn)]
    return drawn


def try_fault(copy: Copy, fault: Fault, runs: Iterable[Sequence[str]]) -> Trial:
    """Run the tests with the fault planted, until one is red: it must be so again, and not without."""
    source = (copy.root / fault.file).read_text(encoding="utf-8")
    limits = ("-m", "not long", f"--session-timeout={RUN_S}")

    def run(tests: Sequence[str], *options: str) -> Trial:
        return copy.try_tests(tests, *options, limit_s=HANG_S, is_red_enough=True, SIM_SEEDS=SEEDS)

    with copy.changed(fault.file, fault.plant(source)):
        trials = (run(tests, *limits) for tests in runs)
        trial = next((each for each in trials if each.verdict is not Verdict.SURVIVED), UNSEEN)
        if trial.verdict is not Verdict.KILLED or "::" not in trial.detail:
            return trial
        again = run([trial.detail])
    if (again.verdict, run([trial.detail]).verdict) != (Verdict.KILLED, Verdict.SURVIVED):
        return Trial(Verdict.BROKEN, f"{trial.detail} is not red each time with the fault, and green without")
    return trial


class Nearness:
    """Which tests are near to a fault: by what they are called and import, and whether they name its function."""

    def __init__(self, root: Path) -> None:
        paths = _sources(root, (*PRODUCT, "tests"))
        self._texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self._importers: dict[str, set[str]] = defaultdict(set)
        modules = {_module(name): name for name in self._texts}
        for name, text in self._texts.items():
            for module in _imported(name, text) & modules.keys():
                self._importers[modules[module]].add(name)

    def runs(self, fault: Fault) -> list[list[str]]:
        """Return files of tests: the nearest, then the others, each from the cheap to the dear."""
        function = _enclosing(self._texts[fault.file][: fault.start])
        distances = self._distances(fault.file, function)
        named = re.compile(rf"\b{function}\b")
        words = _words(fault.file)

        def rank(name: str) -> tuple[int, int, int]:
            text = self._texts[name]
            return -len(words & _words(name)) - bool(named.search(text)), distances[name], len(text)

        nearest: list[str] = []
        others: list[str] = []
        for folders, far in FOLDER_REACH if "spark" in fault.file else FOLDER_REACH[:-1]:
            tests = [name for name in distances if re.match(rf"tests/(?:{folders})/test_(?!one_seed)", name)]
            near = sorted((name for name in tests if rank(name)[0] or distances[name] <= far), key=rank)
            nearest += near[:NEAREST]
            others += near[NEAREST:MOST_FILES]
        return [tests for tests in (nearest, others) if tests]

    def _distances(self, file: str, function: str) -> dict[str, int]:
        """How many imports lead from each file to this one; to a script of SQL, to what calls its function."""
        border = {file} if file.endswith(".py") else self._callers(function)
        found = dict.fromkeys(border, 0)
        while border:
            border = {importer for name in border for importer in self._importers[name]} - found.keys()
            found |= dict.fromkeys(border, max(found.values()) + 1)
        return found

    def _callers(self, function: str) -> set[str]:
        """The files that call it, or a function of SQL that calls it, and so on."""
        bodies = [match for text in self._texts.values() for match in _FUNCTION.finditer(text)]
        functions, count = {function}, 0
        while len(functions) > count:
            count, calls = len(functions), re.compile(rf"\b(?:{'|'.join(functions)})\b")
            functions |= {body[1] for body in bodies if calls.search(body[2])}
        return {name for name, text in self._texts.items() if name.endswith(".py") and calls.search(text)}


_FUNCTION = re.compile(r"^create function (\w+)(.*?)\$\$;?$", re.MULTILINE | re.DOTALL)
_DEFINITION = re.compile(r"^(?: *(?:async )?def|class|create function) (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)


def _sources(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    return (p for folder in folders for p in sorted((root / folder).rglob("*")) if p.suffix in (".py", ".sql"))


def _module(name: str) -> str:
    for folder in FOLDERS:
        name = name.removeprefix(f"{folder}/")
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _words(name: str) -> set[str]:
    """The words of a path below the folder of its package, without their plural."""
    return {word.removesuffix("s") for word in re.split(r"\W|_", "/".join(name.split("/")[2:]))} - {"test", "py", "sql"}


def _imported(name: str, text: str) -> set[str]:
    """What a file imports, by whatever way: modules, names in them, and texts that might be modules or are not."""
    package = _module(name.rpartition("/")[0])
    found = {f"{package}.conftest"} if "/test_" in name else set()
    for node in ast.walk(ast.parse(text)) if name.endswith(".py") else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value, f"{package}.{node.value}"}
    return found


def _enclosing(before: str) -> str:
    """The function, class or name of the module that is being defined at the end of a text."""
    definitions = [match[1] or match[2] for match in _DEFINITION.finditer(before)]
    return definitions[-1] if definitions else "nothing"
