"""The product's folders: few entries in each, no circle between them at any level, few floors, and no long file."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    name.rpartition("/")[2]: ROOT / name
    for name in (
        "protocol/sublet_protocol",
        "storage/sublet_storage",
        "leader/sublet_leader",
        "borrower/sublet_borrower",
        "borrower/pyspark_sublet",
        "sublet",
    )
}
MAX_ENTRIES = 12
MAX_LINES = 500
MAX_FLOORS = {"sublet_protocol": 3, "sublet_storage": 7, "sublet_leader": 6, "sublet_borrower": 7, "sublet.cli": 3}
"""How many floors the entries of a folder stand on at most, where each entry is above all that it imports."""

Graph = Mapping[str, set[str]]


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its import name, generated code left out."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                parts = [package, *path.relative_to(folder).with_suffix("").parts]
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def folders() -> dict[str, Path]:
    """Every folder with modules by its import name."""
    return {name: path.parent for name, path in modules().items() if path.name == "__init__.py"}


def imported(name: str) -> Iterator[str]:
    """The modules of ours that it imports, inside of functions too, those that are only for annotations left out."""
    tree = ast.parse(modules()[name].read_text())
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                entire = f"{node.module}.{alias.name}"
                if entire in modules():
                    yield entire
                elif node.module in modules():
                    yield node.module


@cache
def imports() -> Graph:
    """Who imports whom."""
    return {name: set(imported(name)) for name in modules()}


def entries(folder: str) -> Graph:
    """The entries of a folder, files and folders, and which of each other they import."""
    found: dict[str, set[str]] = {}
    for name, others in imports().items():
        mine = entry(folder, name)
        if mine is None:
            continue
        found.setdefault(mine, set()).update(
            theirs for other in others if (theirs := entry(folder, other)) not in (None, mine)
        )
    return found


def entry(folder: str, module: str) -> str | None:
    """The entry of the folder that the module is, or is below of."""
    prefix = f"{folder}."
    return module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else None


def floors(graph: Graph) -> int:
    """The longest way down. Raise `RecursionError` where there is a circle."""

    @cache
    def height(name: str) -> int:
        return 1 + max((height(below) for below in graph[name]), default=0)

    return max(map(height, graph), default=0)


def circle(graph: Graph) -> list[str]:
    """Entries that import each other in a circle; none where there is no circle."""

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for below in sorted(graph[name]):
            if found := walk(below, [*way, name]):
                return found
        done.add(name)
        return []

    done: set[str] = set()
    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def counted(folder: Path) -> list[str]:
    """The names in a folder that a reader has to choose between."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in ("__init__.py", "py.typed", "__pycache__") and not path.name.startswith(".")
    )


def test_no_folder_has_more_than_a_dozen_entries() -> None:
    many = {name: found for name, path in folders().items() if len(found := counted(path)) > MAX_ENTRIES}
    assert not many


def test_every_folder_describes_what_is_in_it() -> None:
    silent = [
        name for name, path in folders().items() if not ast.get_docstring(ast.parse((path / "__init__.py").read_text()))
    ]
    assert not silent
    roomless = {path.parent for path in modules().values() if not (path.parent / "__init__.py").is_file()}
    assert not roomless


def test_no_circle_between_the_entries_of_a_folder() -> None:
    assert not {folder: found for folder in sorted(folders()) if (found := circle(entries(folder)))}


def test_few_floors() -> None:
    found = {folder: floors(entries(folder)) for folder in MAX_FLOORS}
    assert not {folder: number for folder, number in found.items() if number > MAX_FLOORS[folder]}


def test_no_circle_between_packages() -> None:
    graph: dict[str, set[str]] = {name: set() for name in PACKAGES}
    for name, others in imports().items():
        mine = name.partition(".")[0]
        graph[mine] |= {other.partition(".")[0] for other in others} - {mine}
    assert circle(graph) == []
    assert floors(graph) == 4


def test_no_file_is_too_long_to_read() -> None:
    long = {name for name, path in modules().items() if len(path.read_text().splitlines()) > MAX_LINES}
    assert not long


def test_sql_is_in_storage() -> None:
    """Nothing else executes a statement."""
    executing = {
        name
        for name, path in modules().items()
        if name.partition(".")[0] != "sublet_storage" and ".execute" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ("execute", "executemany")
    }
    assert not executing


def test_what_is_installed_is_ours_by_name() -> None:
    """Other distributions, and files beside a user's program, have names such as `storage` and `protocol`."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    names = {wheel["sources"].get(path, path).partition("/")[0] for path in wheel["only-include"]}
    assert names == set(PACKAGES)
    assert all("sublet" in name for name in names)


def test_circles_and_floors_are_seen() -> None:
    graph: Graph = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert (circle(graph), floors(graph)) == ([], 3)
    assert circle({**graph, "c": {"a"}}) == ["a", "b", "c", "a"]
