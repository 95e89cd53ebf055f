"""Lists of planted faults: reads them, and rejects entries that cannot work before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutations.possible_faults import Fault, find_faults

LISTS = Path("tools/mutations/lists")
"""Folder of the lists, relative to the root of the tree."""

SIMULATED = Path("tests/simulation/faults.toml")
"""List of the faults that the simulator finds by itself."""

EQUIVALENT = Path("tools/mutations/equivalent.toml")
"""Faults that no test can detect, as {file: {change: reason}}: they are not drawn."""

_KEYS = {"ids", "file", "find", "replace", "tests"}
_REMARK = "caught"
"""Optional key: which test noticed, for readers."""


class InvalidList(Exception):
    """Error in an entry; the message names the entry, the mistake and a hint."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `file`, `find` becomes `replace`; then one of `tests` (pytest selectors) must fail.

    `ids` may be empty: not everything worth proving is a requirement of the list.
    """

    name: str
    ids: tuple[str, ...]
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


def load(root: Path) -> list[Mutant]:
    """Return all entries of all lists, in the order of the file names. Raise `InvalidList` if one cannot be read."""
    paths = [*sorted((root / LISTS).glob("*.toml")), *([root / SIMULATED] if (root / SIMULATED).is_file() else [])]
    mutants = [mutant for path in paths for mutant in _read(path)]
    seen: set[str] = set()
    for mutant in mutants:
        if mutant.name in seen:
            raise InvalidList(
                f"{mutant.name!r} is listed twice: a name stands for one mutant, give one of them another."
            )
        seen.add(mutant.name)
    return mutants


def load_equivalent(root: Path) -> set[Fault]:
    """Return the possible faults that no test can detect. Raise `InvalidList` if the list cannot be read, or an entry
    fits not exactly one."""
    path = root / EQUIVALENT
    return {_find(root, *entry) for entry in _entries(path)} if path.is_file() else set()


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, change) of a list of {file: {change: reason}}."""
    return ((file, change) for file, reasons in _parse(path).items() for change in reasons)


def _find(root: Path, file: str, change: str) -> Fault:
    """Return the fault that begins in the text of a change `KIND: TEXT`, or `KIND: TEXT -> REPLACEMENT`."""
    kind, _, rest = change.partition(": ")
    text, _, replace = rest.partition(" -> ")
    source = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
    begins = source.find(text)
    fits = [
        fault
        for fault in find_faults(file, source)
        if fault.kind == kind and begins <= fault.start < begins + len(text) and replace in ("", fault.replace)
    ]
    if source.count(text) != 1 or len(fits) != 1:
        raise InvalidList(
            f"{EQUIVALENT.name}: {change!r} fits {len(fits)} faults of {file}, its text {source.count(text)} places; "
            "each must be one. The code has moved on: make it fit again."
        )
    return fits[0]


def select(mutants: Iterable[Mutant], wanted: Collection[str]) -> list[Mutant]:
    """Return the mutants with one of the wanted ids or names, or all if `wanted` is empty. Raise `InvalidList` if an id
    or name is unknown."""
    known = list(mutants)
    names = {word for mutant in known for word in (mutant.name, *mutant.ids)}
    if unknown := sorted(set(wanted) - names):
        raise InvalidList(f"no mutant is called, or is for, {', '.join(unknown)}: --list shows what there is.")
    return [mutant for mutant in known if not wanted or not {mutant.name, *mutant.ids}.isdisjoint(wanted)]


def planted(mutant: Mutant, source: str) -> str:
    """Return the source with the fault in it. Raise `InvalidList` unless `find` occurs exactly once."""
    times = source.count(mutant.find)
    if times != 1:
        raise InvalidList(
            f"{mutant.name!r}: its text occurs {times} times in {mutant.file}, and must occur exactly once. "
            "The code has moved on: make `find` fit it again."
        )
    return source.replace(mutant.find, mutant.replace)


def check(mutants: Iterable[Mutant], root: Path) -> None:
    """Raise `InvalidList` for the first entry whose file, text or tests do not exist."""
    for mutant in mutants:
        if not (root / mutant.file).is_file():
            raise InvalidList(f"{mutant.name!r}: there is no file {mutant.file}.")
        planted(mutant, (root / mutant.file).read_text(encoding="utf-8"))
        for selector in mutant.tests:
            if not (root / selector.partition("::")[0]).exists():
                raise InvalidList(f"{mutant.name!r}: there is no test file for {selector}.")


def _read(path: Path) -> list[Mutant]:
    """Return the entries of a list; keys that are the same in `each` stand there."""
    found = _parse(path)
    each = found.pop("each", {})
    return [_entry(path, name, {**each, **raw} if isinstance(raw, dict) else {}) for name, raw in found.items()]


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidList(f"{path.name} is not TOML: {error}") from None


def _entry(path: Path, name: str, raw: dict[str, Any]) -> Mutant:
    where = f"{path.name}, {name!r}"
    if raw.keys() - {_REMARK} != _KEYS:
        raise InvalidList(f"{where} has the keys {sorted(raw)}, and needs exactly {sorted(_KEYS)}.")
    for key in ("ids", "tests"):
        if not (isinstance(raw[key], list) and all(isinstance(item, str) for item in raw[key])):
            raise InvalidList(f"{where}: `{key}` must be a list of strings.")
    for key in ("file", "find", "replace", *(key for key in raw if key == _REMARK)):
        if not isinstance(raw[key], str):
            raise InvalidList(f"{where}: `{key}` must be a string.")
    if not raw["tests"]:
        raise InvalidList(f"{where}: `tests` must name at least one test.")
    if raw["find"] == raw["replace"] or not raw["find"]:
        raise InvalidList(f"{where}: `find` must be some text, and `replace` another.")
    return Mutant(name, tuple(raw["ids"]), raw["file"], raw["find"], raw["replace"], tuple(raw["tests"]))
