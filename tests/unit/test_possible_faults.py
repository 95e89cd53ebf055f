"""Which faults the tool that plants them can think of, on small texts."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tools.mutations import sample
from tools.mutations.entries import EQUIVALENT
from tools.mutations.possible_faults import find_faults
from tools.mutations.sample import Nearness, draw


def faulty(file: str, text: str) -> list[tuple[str, str]]:
    """Return the kind of each fault, and the text with it."""
    source = dedent(text)
    return [(fault.kind, fault.plant(source).strip()) for fault in find_faults(file, source)]


def in_sql(text: str) -> list[tuple[str, str]]:
    found = faulty("a.sql", f"create function f() as $${text}$$;")
    return [(kind, planted.partition("$$")[2].removesuffix("$$;").strip()) for kind, planted in found]


GUARDS = "\n  if not found then\n    a := 'b';\n    return;\n  end if;\n  if c then\n    d := 1;\n  end if;\n"


@pytest.mark.parametrize(
    ("text", "kind", "faults"),
    [
        ("select 1 from a for update;", "lock", ["select 1 from a;"]),
        ("select 1 from a for no key update of a skip locked;", "lock", ["select 1 from a;"]),
        ("select 1 into b from a\n for share;", "lock", ["select 1 into b from a;"]),
        (
            "a < b; c ->> d >= '<'; e <> f; g => h",
            "comparison",
            ["a <= b; c ->> d >= '<'; e <> f; g => h", "a < b; c ->> d > '<'; e <> f; g => h"],
        ),
        (GUARDS, "guard", ["if c then\n    d := 1;\n  end if;"]),
    ],
)
def test_faults_of_sql(text: str, kind: str, faults: list[str]) -> None:
    """Row locks and guards are dropped, boundaries are moved."""
    assert in_sql(text) == [(kind, planted) for planted in faults]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("from a where b and c order by d", {"from a where c order by d", "from a where b order by d"}),
        ("where (b or c) and d;", {"where d;", "where (b or c) ;"}),
        ("where a between 1 and 2 and b;", {"where b;", "where a between 1 and 2 ;"}),
        (
            "where x and exists (select from t where 'y and z' = y)",
            {"where exists (select from t where 'y and z' = y)", "where x ;"},
        ),
        ("where a -- and so on\n", set()),
        ("where a is distinct from b and c;", {"where c;", "where a is distinct from b ;"}),
    ],
)
def test_parts_of_conditions_are_dropped_in_sql(text: str, without: set[str]) -> None:
    found = {" ".join(planted.split()) for _, planted in in_sql(text)}
    assert found == without


def test_no_clock_is_exactly_at_a_boundary() -> None:
    found = [planted for kind, planted in in_sql("where a < clock_timestamp() - b and c > 1;") if kind == "comparison"]
    assert found == ["where a < clock_timestamp() - b and c >= 1;"]


def test_tables_and_indexes_are_left_alone() -> None:
    assert faulty("a.sql", "create index i on t (a) where b > 1 and c;") == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('A = "select from b where c for update"', ['A = "select from b where c"']),
        (
            'execute(\n    "select from b where c = %s"\n    " and d", e)',
            [
                'execute(\n    "select from b where"\n    " d", e)',
                'execute(\n    "select from b where c = %s"\n    " ", e)',
            ],
        ),
        ('A = f"""\nselect {B}\n where c < %(d)s"""', ['A = f"""\nselect {B}\n where c <= %(d)s"""']),
        ('"""Wait for update."""', []),
        ('raise Conflict("where a < b")', []),
    ],
)
def test_sql_in_python_is_found(text: str, faults: list[str]) -> None:
    assert [planted for _, planted in faulty("a.py", text)] == faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a = (b or c) and d", {"a = (d)", "a = (b or c)"}),
        ("a = (b := c) and b.d", {"a = ((b := c))"}),
        ("a = 'ä' and b < c", {"a = (b < c)", "a = ('ä')", "a = 'ä' and b <= c"}),
        ("a = 0 <= b < c", {"a = 0 < b < c", "a = 0 <= b <= c"}),
        ("while monotonic() < deadline:\n    pass", set()),
        ("assert a < b and c", set()),
        ("log.info('%s', a and b)", set()),
        ("def __repr__(self):\n    return a and b", set()),
        ("a == b", set()),
        ("if a:\n    return\nb()", {"pass\nb()"}),
        ("for a in b:\n    if c:\n        continue\n    d()", {"for a in b:\n    pass\n    d()"}),
        ("if a:\n    raise AssertionError", set()),
        ("if a:\n    return 1\nelse:\n    b()", set()),
        ("if a:\n    b()", set()),
        ("if (a := b()):\n    return a", set()),
        ("a = conn.execute(b)\nc = conn.execute(d)", {"c = conn.execute(d)\na = conn.execute(b)"}),
        ("a = conn.execute(b)\nc = conn.execute(a)", set()),
        ("self.a = b(conn)\nc = d(self.a, conn)", set()),
        ("a = B(conn)\nc = conn.execute(d)", set()),
        ("yield partial(a, conn)\nyield partial(b, conn)", set()),
        ("if a:\n    lock(conn)\n    b = c(conn)", {"if a:\n    b = c(conn)\n    lock(conn)"}),
        ("conn.execute(a)\nconn.execute(b)", set()),
    ],
)
def test_faults_of_python(text: str, faults: set[str]) -> None:
    assert {planted for _, planted in faulty("a.py", text)} == faults


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small product: a script with a function, a module that calls it, one that imports that, and tests."""
    for name, text in {
        "migrations/sql/0101_log.sql": "create function append() as $$\nselect 1 from a where b and c for update;\n$$;",
        "storage/sublet_storage/log/store.py": "def store(conn):\n    conn.execute('select append()')\n",
        "leader/sublet_leader/work.py": "from sublet_storage.log import store\n\nif 0 < store.A:\n    exit()\n",
        "leader/sublet_leader/demo/play.py": "if a < b and c:\n    raise d\n",
        "tests/kit.py": "import sublet_leader.work\n",
        "tests/unit/test_work.py": "import sublet_leader.work\n",
        "tests/unit/test_other.py": "import sublet_leader.demo.play\n",
        "tests/contract/test_log.py": "from tests.kit import work\ndef test_append(): ...\ndef test_other(): ...\n",
        "tests/contract/conftest.py": "import sublet_storage.log.store\n",
        "tests/contract/test_a.py": "@pytest.mark.long\ndef test_long(): ...\ndef test_a(): ...\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_seed_decides_what_is_drawn(tree: Path) -> None:
    drawn = draw(tree, 3, seed=1)
    assert drawn == draw(tree, 3, seed=1)
    assert [fault.kind for fault in drawn] == ["lock", "conjunct", "comparison"]
    assert len({tuple(draw(tree, 3, seed)) for seed in range(20)}) == 2
    assert set(draw(tree, 9, seed=2)) == set(draw(tree, 4, seed=3)), "no more than there are, and none of the demo"


def test_what_nobody_could_see_is_not_drawn(tree: Path) -> None:
    """The others are those that are drawn without it."""
    for seed in range(5):
        (tree / EQUIVALENT).unlink(missing_ok=True)
        drawn = draw(tree, 9, seed)
        (tree / EQUIVALENT).parent.mkdir(parents=True, exist_ok=True)
        (tree / EQUIVALENT).write_text('["migrations/sql/0101_log.sql"]\n"lock:  for update" = "x"\n')
        assert draw(tree, 9, seed) == [fault for fault in drawn if fault.kind != "lock"]


def test_the_nearest_tests_of_a_fault_come_first(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(kind: str) -> list[list[str]]:
        fault = next(fault for fault in draw(tree, 9, 0) if fault.kind == kind)
        return [[test.removeprefix("tests/") for test in tests] for _, tests in Nearness(tree).runs(fault)]

    log = ["contract/test_log.py::test_append", "contract/test_log.py::test_other"]
    assert runs("comparison") == [["unit/test_work.py"], log, ["unit"]]
    assert runs("lock") == [[*log, "contract/test_a.py::test_a"]], "no quick test runs SQL"
    monkeypatch.setattr(sample, "SLOW_TESTS", 1)
    assert runs("lock") == [log[:1]]
