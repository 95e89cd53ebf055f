"""A small run of the fuzzer, always the same; `python -m tests.fuzz` makes longer and other ones."""

from __future__ import annotations

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import arrow

EXECUTIONS = 4000


@pytest.mark.conforms("X4", "X7")
def test_mutated_blocks_end_no_process() -> None:
    decoded, failures = fuzz.run("arrow", 1, range(EXECUTIONS))
    assert failures == []
    assert EXECUTIONS / 20 < decoded < EXECUTIONS / 2, "they are neither all refused nor hardly changed"


@pytest.mark.parametrize("target", ["command_line", "text", "wire"])
@pytest.mark.conforms("X4", "X7")
def test_mutated_text_and_messages_are_read_or_refused(target: str) -> None:
    decoded, failures = fuzz.run(target, 1, range(EXECUTIONS))
    assert failures == []
    assert EXECUTIONS / 20 < decoded < EXECUTIONS * 3 / 4, "they are neither all refused nor hardly changed"


def test_an_execution_is_the_same_each_time() -> None:
    assert [arrow.case_of(7, number) for number in range(200)] == [arrow.case_of(7, number) for number in range(200)]
    assert all(arrow.execute(7, number) for number in (0, 100, 200)), "real ones are decoded"


def test_a_child_that_dies_is_named() -> None:
    """With its signal or error, and how to repeat it; the executions behind it are run all the same."""
    decoded, (died, grew) = fuzz.run("faults", 1, range(10))
    assert died == "execution 3: SIGSEGV\n  again: python -m tests.fuzz --target faults --seed 1 --only 3"
    assert grew.startswith("execution 5: Traceback")
    assert "MemoryError" in grew
    assert decoded == 7
    assert fuzz.run("faults", 1, range(6, 10)) == (3, []), "a run goes on where another one ended"
