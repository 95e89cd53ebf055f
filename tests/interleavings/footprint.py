"""Which statements may change places: those of which neither writes a table that the other reads or writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg

from sublet_storage.db.connect import resolve_schema_name

_READS = re.compile(r"select(?!.*\bfor (no key |key )?(update|share))(?!.*\w_(lock|block|epochs|lease)\(|.*advance)")
_TOUCHES_ALL = re.compile(r"create |alter |drop |.*advisory", re.IGNORECASE)

_TABLES = """
select relname, array(select confrelid::regclass::text from pg_constraint where conrelid = c.oid and contype = 'f')
  from pg_class c where relnamespace = %s::regnamespace and relkind in ('r', 'p') and not relispartition"""
_FUNCTIONS = "select proname, string_agg(prosrc, ' ') from pg_proc where pronamespace = %s::regnamespace group by 1"


@dataclass(frozen=True, slots=True)
class Footprint:
    """The tables that a statement touches."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def __or__(self, other: Footprint) -> Footprint:
        return Footprint(self.reads | other.reads, self.writes | other.writes)

    def commutes(self, other: Footprint) -> bool:
        """Return whether it makes no difference which of the two comes first."""
        return not (self.writes & (other.reads | other.writes) or other.writes & self.reads)


class Footprints:
    """Those of statements in our schema. What a function of ours touches counts for who calls it, and what a foreign
    key refers to for who writes; a statement that is no plain query counts as writing all that it names, and one that
    names nothing as writing everything: it stands for something else."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._referred = {name: frozenset(to) for name, to in conn.execute(_TABLES, (resolve_schema_name(),))}
        self._bodies = dict(conn.execute(_FUNCTIONS, (resolve_schema_name(),)).fetchall())

    def of(self, statement: str) -> Footprint:
        if _TOUCHES_ALL.match(statement):
            return Footprint(writes=frozenset(self._referred))
        words, called = _words(statement), set[str]()
        while new := words & self._bodies.keys() - called:
            called |= new
            words = words.union(*(_words(self._bodies[name]) for name in new))
        named = frozenset(words & self._referred.keys())
        if not named:
            return Footprint(writes=frozenset(self._referred))
        if _READS.match(statement):
            return Footprint(reads=named)
        return Footprint(named.union(*(self._referred[name] for name in named)), named)


def _words(text: str) -> set[str]:
    """Return all words that may be names, partitions replaced by their tables."""
    return {word.rstrip("_") for word in re.findall(r"[a-z_]+", text.lower())}
