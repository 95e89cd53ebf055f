"""No name of before the glossary comes back, in code, statements, messages or answers: those of `old_names.toml`."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sublet_protocol.v1 import sublet_pb2
from tests.unit.test_names import PRODUCT, ROOT, names_outside_of_texts

OLD: dict[str, Any] = tomllib.loads((Path(__file__).parent / "old_names.toml").read_text())
TEXTS = [
    *(file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")),
    *(ROOT / "migrations/sql").glob("*.sql"),
    *(ROOT / "leader").glob("**/static/*.js"),
    *(file for file in (ROOT / "docs").glob("*.md") if file.name != "conformance.md"),
    ROOT / "README.md",
]
KEYS_ELSEWHERE = {
    "storage/sublet_storage/notify/drivers/zmq.py: curve"  # an ability of ZeroMQ
}


class Definitions:
    """What a source text defines: `names` of any kind, `members` by class, and names at the `top` level. Expressions
    are not looked into, which takes most of the time.
    """

    def __init__(self, source: str) -> None:
        self.names, self.top = set[str](), set[str]()
        self.members: dict[str, set[str]] = defaultdict(set)
        self._read(ast.parse(source), self.top)

    def _read(self, block: ast.AST, bound: set[str], owner: str = "") -> None:
        """Read the statements of a block, which bind names to what it is a block of; `owner`: the class around."""
        for node in ast.iter_child_nodes(block):
            if isinstance(node, ast.ClassDef):
                bound.add(node.name)
                self._read(node, self.members[node.name], node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bound.add(node.name)
                arguments = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                self.names |= arguments
                if owner and node.name == "__init__":
                    self.members[owner] |= arguments
                elif owner:
                    self.members[f"{owner}.{node.name}"] |= arguments
                self._read(node, set(), owner)
            elif isinstance(node, ast.stmt | ast.withitem | ast.ExceptHandler | ast.match_case | ast.alias):
                self._bind(node, bound, owner)
                self._read(node, bound, owner)
        self.names |= bound

    def _bind(self, node: ast.AST, bound: set[str], owner: str) -> None:
        match node:
            case ast.alias(asname=str(name)):
                bound.add(name)
            case ast.Assign(targets):
                self._bind_targets(targets, bound, owner)
            case ast.AnnAssign(target) | ast.For(target) | ast.withitem(optional_vars=ast.expr() as target):
                self._bind_targets([target], bound, owner)

    def _bind_targets(self, targets: list[ast.expr], bound: set[str], owner: str) -> None:
        for each in (node for target in targets for node in ast.walk(target)):
            match each:
                case ast.Name(name, ast.Store()):
                    bound.add(name)
                case ast.Attribute(ast.Name("self"), name, ast.Store()) if owner:
                    self.names.add(name)
                    self.members[owner].add(name)


@cache
def sources() -> dict[str, str]:
    files = (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files if "_pb2" not in file.name}


@cache
def anywhere() -> set[str]:
    return {*OLD["anywhere"]["classes"].split(), *OLD["anywhere"]["others"].split()}


@cache
def owned(kind: str) -> dict[str, set[str]]:
    """Return {OWNER: OLD NAMES} of the list."""
    return {owner: set(old.split()) for owner, old in re.findall(r"([\w.]+)\(([^)]*)\)", OLD["owned"][kind])}


@cache
def by_owner() -> dict[str, set[str]]:
    """{class, or name at the top level: what is not to be a member of it, or beside it}."""
    found = defaultdict[str, set[str]](set)
    for owner, old in (*owned("members").items(), *owned("beside").items()):
        found[owner.partition(".")[0]] |= old
    return found


def may_define_old_names(source: str) -> bool:
    found = names_outside_of_texts(source)
    return bool(found & anywhere()) or any(found & by_owner()[owner] for owner in found & by_owner().keys())


def old_names(files: dict[str, str]) -> set[str]:
    """FILE: NAME of each old name that is defined, of a member as CLASS.NAME."""
    modules = set(OLD["anywhere"]["modules"].split())
    found = {f"{file}: {part}" for file in files for part in set(Path(file).with_suffix("").parts) & modules}
    for file, source in files.items():
        if not may_define_old_names(source):
            continue
        defined = Definitions(source)
        found |= {f"{file}: {name}" for name in defined.names & anywhere()}
        for name, members in defined.members.items():
            found |= {f"{file}: {name}.{old}" for old in members & owned("members").get(name, set())}
        for name in defined.top & owned("beside").keys():
            found |= {f"{file}: {old}" for old in defined.top & owned("beside")[name]}
    return found


def schema(scripts: Iterable[str]) -> tuple[dict[str, set[str]], set[str]]:
    """Return {table: columns}, and the functions."""
    tables, functions = defaultdict[str, set[str]](set), set[str]()
    for script in scripts:
        for name, body in re.findall(r"^create table (\w+) \((.*?)^\)", script, re.MULTILINE | re.DOTALL):
            tables[name] |= set(re.findall(r"^  (\w+) ", body, re.MULTILINE))
        functions |= set(re.findall(r"^create (?:or replace )?(?:function|procedure) (\w+)", script, re.MULTILINE))
    return tables, functions


def old_in_sql(scripts: Iterable[str]) -> set[str]:
    tables, functions = schema(scripts)
    columns = {table: set(old.split()) for table, old in OLD["sql"]["columns"].items()}
    return {
        *(tables.keys() & set(OLD["sql"]["tables"].split())),
        *(functions & set(OLD["sql"]["functions"].split())),
        *(f"{table}.{name}" for table, old in columns.items() for name in tables[table] & old),
    }


def old_in_texts(texts: dict[str, str]) -> set[str]:
    old = {word for kind in OLD["texts"].values() for word in kind.split()}
    return {f"{name}: {word}" for name, text in texts.items() for word in old & set(re.findall(r"[\w-]+", text))}


def old_keys(sources: dict[str, str]) -> set[str]:
    """FILE: KEY of texts and attributes that are old keys."""
    keys = {*OLD["json"]["keys"].split(), *OLD["json"]["values"]}
    possible = re.compile(rf"""[."'](?:{"|".join(keys)})\b""")
    return {
        f"{file}: {word}"
        for file, source in sources.items()
        if possible.search(source)
        for node in ast.walk(ast.parse(source))
        for word in (node.value if isinstance(node, ast.Constant) else getattr(node, "attr", None),)
        if isinstance(word, str) and word in keys
    }


def scripts() -> list[str]:
    return [file.read_text() for file in (ROOT / "migrations/sql").glob("*.sql")]


def test_no_definition_has_an_old_name() -> None:
    assert old_names(sources()) == set()


def test_what_old_names_are_listed_for_is_there() -> None:
    """Who renames it changes the list, too."""
    code = "\n".join(sources().values())
    classes = set(re.findall(r"^ *class (\w+)", code, re.MULTILINE))
    top = set(re.findall(r"^(?:(?:async )?def |class )?(\w+)", code, re.MULTILINE))
    assert {owner.partition(".")[0] for owner in owned("members")} - classes == set()
    assert owned("beside").keys() - top == set()
    assert OLD["sql"]["columns"].keys() - schema(scripts())[0].keys() == set()
    assert OLD["wire"]["fields"].keys() - set(sublet_pb2.DESCRIPTOR.message_types_by_name) == set()


def test_no_setting_metric_or_option_has_an_old_name() -> None:
    assert old_in_texts({str(file.relative_to(ROOT)): file.read_text() for file in TEXTS}) == set()


def test_nothing_of_the_schema_has_an_old_name() -> None:
    assert old_in_sql(scripts()) == set()


def test_nothing_of_the_protocol_has_an_old_name() -> None:
    messages = sublet_pb2.DESCRIPTOR.message_types_by_name
    found = {
        f"{name}.{field}"
        for name, old in OLD["wire"]["fields"].items()
        for field in set(messages[name].fields_by_name) & set(old.split())
    }
    assert found | (set(messages) & set(OLD["wire"]["messages"].split())) == set()


def test_no_key_of_json_has_an_old_name() -> None:
    keys = set(OLD["json"]["keys"].split())
    shown = {
        f"{file.name}: {word}"
        for file in (*ROOT.glob("leader/**/static/*.js"), ROOT / "docs/json.md")
        for word in re.findall(r"[`.](\w+)", file.read_text())
        if word in keys
    }
    assert old_keys(sources()) == KEYS_ELSEWHERE
    assert shown == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Situation: ...", {"x.py: Situation"}),
        ("def f(silence_s): ...", {"x.py: silence_s"}),
        ("from a import RetryPolicy as Policy", {"x.py: Policy"}),
        ("class AllocationInput:\n    free: int\n    plan: int", {"x.py: AllocationInput.free"}),
        ("class Session:\n    def __init__(self, start): self.held = start", {
            "x.py: Session.start", "x.py: Session.held",
        }),
        ("class Batch:\n    def ack(self, upto): ...", {"x.py: Batch.ack.upto"}),
        ("class GrantStream: ...\nclass Grant: ...", {"x.py: Grant"}),
        ("def encode_epochs(): ...\ndef encode(): ...", set()),
        ("class Other:\n    free: int", set()),
    ],
)  # fmt: skip
def test_an_old_name_is_found(source: str, found: set[str]) -> None:
    assert old_names({"x.py": source}) == found


def test_other_old_names_are_found() -> None:
    assert old_names({"leader/sublet_leader/farewell.py": ""}) == {"leader/sublet_leader/farewell.py: farewell"}
    assert old_in_texts({"x": "SUBLET_LEASE_S=1 SUBLET_LEASE_S_OK --max 3 --max-messages"}) == {
        "x: SUBLET_LEASE_S", "x: --max",
    }  # fmt: skip
    table = "create table node (\n  notify text,\n  name text\n);\ncreate function may_come(a int)"
    assert old_in_sql([table]) == {"node.notify", "may_come"}
    assert old_keys({"x.py": "answer = {'kept_s': 1, 'reserved_s': row.lost_messages}"}) == {
        "x.py: kept_s", "x.py: lost_messages",
    }  # fmt: skip
