"""Tests of the leak check of `python -m tests.recorded.soak`, and three minutes of that run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recorded.soak import BOUNDS, SAMPLE_INTERVAL_S, Figure, judge, soak

SEED, MINUTES = 1, 3.0
HOUR_S, SHORT_S = 3600.0, 180.0


def figure(measure: str, value: Callable[[float], float], seconds: float = HOUR_S, every_s: float = 3.0) -> Figure:
    """Return the figure of a measure with this value after that many seconds."""
    times = [number * every_s for number in range(int(seconds / every_s))]
    return judge("n1", measure, [(at_s, value(at_s)) for at_s in times], seconds)


FLAT: dict[str, tuple[str, Callable[[float], float]]] = {
    "constant": ("memory", lambda _: 150.0),
    "caches that fill": ("memory", lambda at_s: 150 + 60 * (1 - math.exp(-at_s / 200))),
    "a step in the first third": ("memory", lambda at_s: 150.0 if at_s < 1000 else 400.0),
    "a step later": ("memory", lambda at_s: 120.0 if at_s < 2300 else 170.0),
    "peaks": ("descriptors", lambda at_s: 300.0 if at_s % 60 < 20 else 20.0),
    "up and down": ("rows", lambda at_s: 100 + 90 * math.sin(at_s / 40)),
    "no more per message": ("bytes per message", lambda at_s: 500 + 1000 / (at_s + 1)),
}
LEAKS: dict[str, tuple[str, Callable[[float], float], float]] = {
    "memory, 20 MiB in an hour": ("memory", lambda at_s: 150 + 20 * at_s / HOUR_S, HOUR_S),
    "memory, 200 KiB a second": ("memory", lambda at_s: 150 + 0.2 * at_s, SHORT_S),
    "a descriptor in 4 minutes": ("descriptors", lambda at_s: 20 + at_s // 240, HOUR_S),
    "a descriptor in 10 s": ("descriptors", lambda at_s: 20 + at_s // 10, SHORT_S),
    "a row a minute": ("rows", lambda at_s: 5 + at_s // 60, HOUR_S),
    "rows that are sometimes removed": ("rows", lambda at_s: at_s / 10 - (30 if at_s % 60 < 20 else 0), HOUR_S),
    "more and more per message": ("bytes per message", lambda at_s: 500 + at_s / 4, HOUR_S),
}


@pytest.mark.parametrize(("measure", "value"), FLAT.values(), ids=FLAT)
def test_what_settles_or_swings_is_flat(measure: str, value: Callable[[float], float]) -> None:
    found = figure(measure, value)
    assert found.is_flat, str(found)


@pytest.mark.parametrize(("measure", "value", "seconds"), LEAKS.values(), ids=LEAKS)
def test_a_leak_is_seen(measure: str, value: Callable[[float], float], seconds: float) -> None:
    """Also on a machine that is too busy for two samples of three."""
    for every_s in (SAMPLE_INTERVAL_S, 2 * SAMPLE_INTERVAL_S):
        found = figure(measure, value, seconds, every_s)
        assert found.growth is not None
        assert not found.is_flat, str(found)


def test_what_was_not_there_is_not_judged() -> None:
    """Neither flat nor growing: a process that was killed, or too few samples."""
    killed = [(at_s, 150.0 + at_s) for at_s in range(0, 1500, 3)]
    few = [(at_s, 150.0 + at_s) for at_s in range(0, 3600, 300)]
    for samples in (killed, few, []):
        found = judge("n1", "memory", samples, HOUR_S)
        assert (found.growth, found.is_flat) == (None, False)
    assert all(bound.floor > 0 or bound.share > 0 for bound in BOUNDS.values())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.conforms("W1", "W2", "W7", "E13", "E25", "X4")
def test_nothing_leaks_in_three_minutes_of_faults(server_home: Path) -> None:
    said: list[str] = []
    assert soak(server_home, SEED, MINUTES * 60, said.append), "\n".join(said)
