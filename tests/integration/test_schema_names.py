"""The schema's names are those of the glossary: none has a word that is not used any more."""

from __future__ import annotations

import re

import psycopg

OLD_WORDS = set(re.findall(r"\w+", """
    tell told hear ears teller voices lookout newsroom lent ways obedience farewell whole kept doomed stuck refused
    payloads place places begun once mixed seize"""))  # fmt: skip
"""In names that are nobody's but the schema's: of indexes, constraints, triggers, parameters and local variables."""


def test_no_old_name_is_left_in_the_schema(conn: psycopg.Connection[tuple[str]]) -> None:
    names = ask(
        conn,
        "select column_name from information_schema.columns where table_schema = 'sublet'"
        " union select relname from pg_class where relnamespace = 'sublet'::regnamespace"
        " union select proname from pg_proc where pronamespace = 'sublet'::regnamespace"
        " union select conname from pg_constraint where connamespace = 'sublet'::regnamespace",
    )
    sources = ask(
        conn,
        "select coalesce(proargnames::text, '') || prosrc from pg_proc where pronamespace = 'sublet'::regnamespace",
    )
    assert {word for name in names for word in name.split("_")} & OLD_WORDS == set()
    assert {word for source in sources for word in words(source)} & OLD_WORDS == set()


def ask(conn: psycopg.Connection[tuple[str]], question: str) -> set[str]:
    return {row[0] for row in conn.execute(question.encode())}


def words(source: str) -> set[str]:
    """The names and keys in a function; comments, and what has blanks in quotes, are for people."""
    code = re.sub(r"--.*|'[^']*'", lambda text: "" if " " in text[0] else text[0], source)
    return set(re.findall(r"\w+", code))
