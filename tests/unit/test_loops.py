"""How a loop over a session was left: by its iterator, without a session."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.consumer.iterators import SessionIterations, SessionIterator
from sublet_borrower.streams.batch import Batch


class Failed(Exception):
    """Work has, or what comes after it."""


class Source:
    """In place of a session: numbered batches, and how it ended with each."""

    def __init__(self) -> None:
        self.loops, self.count, self.ended = SessionIterations(), 0, list[tuple[int, bool]]()

    def __iter__(self) -> SessionIterator:
        return SessionIterator(self, sys._getframe(1))

    def poll(self) -> Any:
        self.count += 1
        return SimpleNamespace(first=self.count)

    def left(self, batch: Batch, *, well: bool) -> None:
        self.ended.append((batch.first, well))


def break_(source: Source) -> None:
    for batch in source:
        if batch.first == 2:
            break


def fail() -> None:
    raise Failed


def in_a_call(source: Source) -> None:
    for batch in source:
        if batch.first == 2:
            fail()


def break_out_of_a_generator(source: Source, clean: Callable[[], object] = list) -> None:
    def batches() -> Iterator[Batch]:
        for batch in source:
            try:
                yield batch
            finally:
                clean()

    for batch in batches():
        if batch.first == 2:
            break


def break_where_the_close_fails(source: Source) -> None:
    def clean() -> None:
        if source.count == 2:
            fail()

    break_out_of_a_generator(source, clean)


def break_where_the_close_raises(source: Source) -> None:
    def batches() -> Iterator[Batch]:
        for batch in source:
            try:
                yield batch
            except GeneratorExit:
                raise Failed from None

    for batch in batches():
        if batch.first == 2:
            break


@pytest.mark.conforms("E37")
@pytest.mark.parametrize(
    ("leave", "well"),
    [
        (break_, True),
        (in_a_call, False),
        (break_out_of_a_generator, True),
        (break_where_the_close_fails, False),
        (break_where_the_close_raises, False),
    ],
)
def test_only_what_ended_well_is_acknowledged(
    leave: Callable[[Source], None], well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a generator around the session fails to do as it is closed."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    source = Source()
    with contextlib.suppress(Failed):
        leave(source)
    assert source.ended == [(1, True), (2, well)]
