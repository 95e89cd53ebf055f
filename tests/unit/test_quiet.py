"""A log that tells the same story only now and then."""

from __future__ import annotations

from storage.groups import quiet
from storage.groups.quiet import Quiet


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_story_is_told_once_in_a_while_and_says_how_often_it_was_kept_back() -> None:
    clock = Clock()
    asked = Quiet(10.0, clock)
    assert [asked.ask("a") for _ in range(5)] == [0, None, None, None, None]
    clock.now += 9.9
    assert asked.ask("a") is None
    clock.now += 0.1
    assert asked.ask("a") == 5
    assert asked.ask("a") is None
    clock.now += 100.0
    assert asked.ask("a") == 1


def test_a_story_that_is_over_is_told_at_once_when_it_begins_again() -> None:
    asked = Quiet(10.0, Clock())
    assert not asked.over("a")
    assert [asked.ask("a"), asked.ask("a")] == [0, None]
    assert [asked.over("a"), asked.over("a")] == [True, False]
    assert asked.ask("a") == 0


def test_subjects_are_told_apart() -> None:
    asked = Quiet(10.0, Clock())
    assert [asked.ask(subject) for subject in ("a", 1, "a", 2, 1)] == [0, 0, None, 0, None]


def test_only_so_many_subjects_are_remembered() -> None:
    asked = Quiet(10.0, Clock())
    for number in range(quiet.REMEMBERED + 5):
        assert asked.ask(number) == 0
    assert len(asked._told) == quiet.REMEMBERED
    assert asked.ask(quiet.REMEMBERED) is None
    assert asked.ask(0) == 0, "forgotten"
