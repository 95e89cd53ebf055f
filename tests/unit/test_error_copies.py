"""Errors on their way to another process, such as that of a pool, and what is asked of timeouts."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sublet import errors
from sublet_protocol.domain.errors import GrantLost, InvalidSetting, SubletError, SubscriptionEnded
from sublet_protocol.domain.timeouts import check_timeout

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SubletError)]
COPIERS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_an_error_is_copied_with_all_it_has(copier: Callable[[Any], Any]) -> None:
    """Of each class, whatever it is made from."""
    made = [kind.__new__(kind, "text") for kind in KINDS]
    for error in [*made, GrantLost(1, 2, 3, 4), SubscriptionEnded("$share/g/#", "deleted", "by hand")]:
        error.add_note("note")
        copied = copier(error)
        assert (type(copied), copied.args, vars(copied)) == (type(error), error.args, vars(error))
        assert copied is not error
    assert len(KINDS) > 40


@pytest.mark.parametrize("given", ["1", b"1", [1], float("nan"), np.array([1, 2]), 1j], ids=ascii)
def test_a_timeout_is_a_number(given: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^timeout_s .*: it is a number of seconds\. Leave it out"):
        check_timeout(given)


@pytest.mark.parametrize(
    ("given", "taken"),
    [(0, 0.0), (-1, -1.0), (np.int64(2), 2.0), (None, None), (math.inf, None), (10**400, None)],
    ids=lambda value: ascii(value)[:9],
)
def test_a_timeout_may_be_over_or_endless(given: Any, taken: float | None) -> None:
    """What a thread cannot wait for is as long as it takes."""
    assert check_timeout(given) == taken
    assert check_timeout(threading.TIMEOUT_MAX) == threading.TIMEOUT_MAX
