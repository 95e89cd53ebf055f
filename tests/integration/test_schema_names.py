"""The schema's names are those of the glossary: none of the old ones is a table, a column or a function of it."""

from __future__ import annotations

import re

import psycopg

OLD_COLUMNS = {
    "space": "payloads payload_places epoch_numbers frontier_moves",
    "block": "epochs",
    "producer": "refused",
    "capability": "begun",
    "node": "notify",
    "consumer_group": "start orders revision",
    "leadership": "step_down before_node before_incarnation before_timeline",
    "lending": "lost_messages",
    "lending_history": "until",
    "payload_object": "at doomed_at tried_at",
    "sink_batch": "once",
}
OLD_TABLES = {"outbox_refused", "payload_place"}
OLD_FUNCTIONS = set(re.findall(r"\w+", """
    draw_session_epoch progress consumed planned note_refusal refuse_message put_into_outbox may_come
    upper_frontier_with payload_places_of position_at"""))  # fmt: skip
OLD_WORDS = set(re.findall(r"\w+", """
    tell told hear ears teller voices lookout newsroom lent ways obedience farewell whole kept doomed stuck refused
    payloads place places begun once mixed seize"""))  # fmt: skip
"""In names that are nobody's but the schema's: of indexes, constraints, triggers, parameters and local variables."""


def test_no_old_name_is_left_in_the_schema(conn: psycopg.Connection[tuple[str]]) -> None:
    columns = ask(
        conn, "select table_name || '.' || column_name from information_schema.columns where table_schema = %s"
    )
    tables = ask(conn, "select relname from pg_class where relnamespace = %s::regnamespace")
    functions = ask(conn, "select proname from pg_proc where pronamespace = %s::regnamespace")
    sources = ask(
        conn, "select coalesce(proargnames::text, '') || prosrc from pg_proc where pronamespace = %s::regnamespace"
    )
    constraints = ask(conn, "select conname from pg_constraint where connamespace = %s::regnamespace")
    assert columns & {f"{table}.{name}" for table, names in OLD_COLUMNS.items() for name in names.split()} == set()
    assert tables & OLD_TABLES == set()
    assert functions & OLD_FUNCTIONS == set()
    assert {
        word for name in columns | tables | constraints | functions for word in re.split(r"[._]", name)
    } & OLD_WORDS == set()
    assert {word for source in sources for word in words(source)} & OLD_WORDS == set()


def ask(conn: psycopg.Connection[tuple[str]], question: str) -> set[str]:
    return {row[0] for row in conn.execute(question, ("sublet",))}


def words(source: str) -> set[str]:
    """The names and keys in a function; comments, and what has blanks in quotes, are for people."""
    code = re.sub(r"--.*|'[^']*'", lambda text: "" if " " in text[0] else text[0], source)
    return set(re.findall(r"\w+", code))
