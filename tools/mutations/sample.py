"""Faults drawn at random by a seed, and the tests that could notice each.

Each kind has the same share of a sample. Near files of the tests that need no server are run first, then the nearest
single tests of the others, until one fails. A failure counts only if it occurs again with the fault, where that may
depend on time, and never without it.
"""

from __future__ import annotations

import ast
import math
import random
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

from tools import source_path
from tools.mutations.entries import load_equivalent
from tools.mutations.possible_faults import KINDS, Fault, find_faults
from tools.mutations.trial import PACKAGES, Copy, Trial, Verdict

PRODUCT = (*PACKAGES.values(), "borrower/pyspark_sublet", "migrations/sql")
QUICK = ("unit", "scenarios")
"""Folders of tests that need no server and take little time: whole files are run."""
SLOW = ("property", "contract", "interleavings", "integration", "spark")
"""Folders of which single tests are run, from the fastest to the slowest. Those of Spark are near only to files with
that name."""
QUICK_FILES, QUICK_DISTANCE, QUICK_S = 6, 2, 40.0
"""Number of files, their greatest number of imports to the fault, and the time after which no further test starts."""
SLOW_TESTS, SLOW_S = 24, 90.0
"""The same of single tests, which may have any distance."""
BROAD = (
    "test_cli_json.py::test_every_answer_has_the_documented_fields",
    "test_cli_groups.py::test_creating_the_same_group_twice_is_no_change",
    "test_cli.py::test_max_acknowledges_exactly_what_was_printed",
    "test_cli_errors.py::test_what_cannot_work_is_refused_with_the_reason",
    "test_feed_read.py::test_history_is_paged_and_in_order",
    "test_feed_publish.py::test_each_delivery_has_the_position_of_its_message",
    "test_http_api.py::test_a_group_is_managed_over_http",
    "test_async_session.py::test_sessions_in_one_loop_share_the_streams",
    "test_auth_sessions.py::test_a_member_that_loses_its_right_is_denied",
    "test_atomic_groups.py::test_completed_epochs_come_and_are_announced",
    "test_watch.py::test_a_watcher_sees_what_history_records",
    "test_tls.py::test_sessions_find_nodes_with_tls",
    "test_stream_reader.py::test_everything_is_in_the_sink_and_acknowledged",
)
"""Integration tests that go through much of the product: they are run at last, where no name leads to one."""
SIMULATED, SEEDS = 6, "20"
"""Distance within which the simulator counts as near, although it names little of what it runs, and its seeds."""
TEST_S, HANG_S = 60.0, 300.0
"""A test, and a run, that takes longer counts as hung."""
TOLERATED = 0.1
"""Share of a sample that may survive: some faults change nothing that a test can detect."""

UNSEEN = Trial(Verdict.SURVIVED, "no test is red")


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Return `count` faults of the product, each kind in turn, the same for the same seed and sources. Changes listed
    as equivalent are left out. Raise `InvalidList` if their list cannot be read."""
    unseen = load_equivalent(root)
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
        found = [pile.pop() for pile in piles if pile]
        drawn += [fault for fault in found if fault not in unseen]
    return drawn[:count]


def try_fault(copy: Copy, fault: Fault, runs: Iterable[tuple[float, Sequence[str]]]) -> Trial:
    """Run the tests with the fault planted until one fails; it must fail again, and pass without the fault."""
    source = (copy.root / fault.file).read_text(encoding="utf-8")

    def run(tests: Sequence[str], *options: str) -> Trial:
        more = ("-m", "not long", f"--timeout={TEST_S}", *options)
        return copy.try_tests(tests, *more, limit_s=HANG_S, is_red_enough=True, SIM_SEEDS=SEEDS)

    with copy.changed(fault.file, fault.plant(source)):
        trials = (run(tests, f"--session-timeout={limit_s}") for limit_s, tests in runs)
        trial = next((each for each in trials if each.verdict is not Verdict.SURVIVED), UNSEEN)
        if trial.verdict is not Verdict.KILLED or "::" not in trial.detail:
            return trial
        is_red_again = _folder(trial.detail) in QUICK or run([trial.detail]).verdict is Verdict.KILLED
    if is_red_again and run([trial.detail]).verdict is Verdict.SURVIVED:
        return trial
    return Trial(Verdict.BROKEN, f"{trial.detail} is not red each time with the fault, and green without")


class Nearness:
    """Ranks tests by their distance to a fault: rare words in common with the function, mainly in names, the number of
    imports between them, and whether they name the function or what calls it."""

    def __init__(self, root: Path) -> None:
        paths = _sources(root, (*PRODUCT, "tests"))
        self._texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self._importers: dict[str, set[str]] = defaultdict(set)
        modules = {_module(name): name for name in self._texts}
        for name, text in self._texts.items():
            for module in _imported(name, text) & modules.keys():
                self._importers[modules[module]].add(name)
        self._tests = {
            test: own
            for name, text in self._texts.items()
            if re.match(r"tests/\w+/test_(?!one_seed)", name)
            for test, own in _tests(name, text)
        }
        self._words = {test: _words(f"{_inside(test)} {own}") for test, own in self._tests.items()}
        frequency = Counter(chain.from_iterable(self._words.values()))
        self._weights = {word: math.log(1 + len(self._words) / count) for word, count in frequency.items()}

    def runs(self, fault: Fault) -> list[tuple[float, list[str]]]:
        """Return the time limit and the tests of each run: the nearest files of quick tests, all interleavings for a
        lock or an order, the nearest single slow tests, from the fastest to the slowest, all quick tests, the
        simulator, and `BROAD`."""
        function, definition = _enclosing(self._texts[fault.file], fault.start)
        callers = self._callers(fault.file, function)
        distances = self._distances(fault.file, callers)
        path, name = _words(_inside(fault.file)), _words(function)
        wanted = path | _words(definition)

        def rank(test: str) -> float:
            found, file = self._words[test], _words(_inside(_file(test)))
            title = _words(test.partition("::")[2])
            weights = (
                self._weights[word] * (1 + (word in path & file) + 2 * (word in name) + 2 * (word in title))
                for word in wanted & found
            )
            named = sum(bool(callers.search(text)) for text in (self._tests[test], self._texts[_file(test)]))
            return -(1 + named) * sum(weights) / math.sqrt(len(found)) / (4 + distances[_file(test)])

        def nearest(count: int, *folders: str, distance: float = math.inf) -> list[str]:
            near = (test for test in self._words if _folder(test) in folders and _file(test) in distances)
            return sorted((test for test in near if distances[_file(test)] <= distance), key=rank)[:count]

        quick = nearest(QUICK_FILES, *QUICK, distance=QUICK_DISTANCE) if fault.file.endswith(".py") else []
        all_quick = sorted({f"tests/{folder}" for test in self._tests if (folder := _folder(test)) in QUICK})
        orders = nearest(99, "interleavings") if fault.kind in ("lock", "order") else []
        slow = nearest(SLOW_TESTS, *SLOW if "spark" in fault.file else SLOW[:-1])
        slow = sorted((test for test in slow if test not in orders), key=lambda test: SLOW.index(_folder(test)))
        runs = (
            (QUICK_S, quick),
            (SLOW_S, orders),
            (SLOW_S, slow),
            (SLOW_S, all_quick if quick else []),
            (SLOW_S, nearest(1, "simulation", distance=SIMULATED)),
            (SLOW_S, [test for each in BROAD if (test := f"tests/integration/{each}") in self._tests]),
        )
        return [(limit_s, tests) for limit_s, tests in runs if tests]

    def _distances(self, file: str, callers: re.Pattern[str]) -> dict[str, int]:
        """Return the number of imports from each file to this one; for a SQL script, to the callers of its function."""
        is_python = file.endswith(".py")
        border = {file} if is_python else {n for n, t in self._texts.items() if n.endswith(".py") and callers.search(t)}
        found = dict.fromkeys(border, 0)
        while border:
            border = {importer for name in border for importer in self._importers[name]} - found.keys()
            found |= dict.fromkeys(border, max(found.values()) + 1)
        return found

    def _callers(self, file: str, function: str) -> re.Pattern[str]:
        """Return what finds the names of a function, of its class, and of those of its file, or of all SQL scripts,
        that call it. Names of one plain word in Python lead to nothing."""
        is_python = file.endswith(".py")
        texts = [self._texts[file]] if is_python else [t for n, t in self._texts.items() if n.endswith(".sql")]
        definitions = [definition for text in texts for definition in _definitions(text)]
        names, count = {function}, 0
        while len(names) > count:
            count = len(names)
            names |= {owner for name, _, owner in definitions if name in names}
            plain = {name for name in names if is_python and not re.search(r"[a-z]_[a-z]|[A-Z]", name)}
            calls = re.compile(rf"\b(?:{'|'.join(names - plain) or '(?!)'})\b")
            names |= {name for name, body, _ in definitions if calls.search(body)}
        return calls


_DEFINITION = re.compile(r"^(?: *(?:async )?def|class|create function) (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)


def _sources(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    return (p for folder in folders for p in sorted((root / folder).rglob("*")) if p.suffix in (".py", ".sql"))


def _module(name: str) -> str:
    for folder in source_path.FOLDERS:
        name = name.removeprefix(f"{folder}/")
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _tests(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield what is run of a file of tests, with the text that it is ranked by."""
    if _folder(name) in QUICK:
        yield name, text
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            own = ast.unparse(node)
            is_long = "pytest.mark.long" in map(ast.unparse, node.decorator_list)
            if not is_long and (_folder(name) != "simulation" or "_no_seed_" in own):
                yield f"{name}::{node.name}", own


def _file(test: str) -> str:
    return test.partition("::")[0]


def _folder(name: str) -> str:
    return name.split("/")[1]


def _inside(name: str) -> str:
    """Return the path below the folder of the package, or of the tests."""
    return "/".join(name.split("/")[2:])


def _words(text: str) -> set[str]:
    """Return the words that names consist of, without plurals."""
    return {word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]{2,}|[A-Z]{3,}", text)} - {"test", "sql"}


def _imported(name: str, text: str) -> set[str]:
    """Return what a file imports: modules, names in them, and string literals, which may be modules."""
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


def _enclosing(text: str, place: int) -> tuple[str, str]:
    """Return the function, class or module variable defined at this offset of a text, and its definition."""
    definitions = _definitions(text)
    ends = list(accumulate(len(definition) for _, definition, _ in definitions))
    return definitions[bisect_right(ends, place)][:2]


def _definitions(text: str) -> list[tuple[str, str, str]]:
    """Return name, text and class, or the name again, of each function, class and module variable, in order; what comes
    before is `nothing`."""
    found = list(_DEFINITION.finditer(text))
    bounds = [0, *(match.start() for match in found), len(text)]
    names = ["nothing", *(match[1] or match[2] for match in found)]
    definitions, owner = list[tuple[str, str, str]](), ""
    for name, (begin, end) in zip(names, pairwise(bounds), strict=True):
        owner = owner if text[begin : begin + 1] == " " else name
        definitions.append((name, text[begin:end], owner))
    return definitions
