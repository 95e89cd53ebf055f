"""Each limit of a field of a message counts among what is allowed, and what is beyond it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_protocol.domain.limits import MAX_EXPLANATION_CHARACTERS
from sublet_protocol.messages.field_checks import (
    MalformedMessage,
    check_entries,
    check_explanation,
    check_natural,
    check_number,
    check_range,
    check_streams,
    check_text,
)

Check = Callable[[], object]

BOUNDS: dict[str, tuple[list[Check], list[Check]]] = {
    "text": (
        [lambda: check_text("x", "a" * 8, 8), lambda: check_text("x", "\u00e9" * 4, 8)],
        [lambda: check_text("x", "a" * 9, 8), lambda: check_text("x", "\u00e9" * 4 + "a", 8)],
    ),
    "explanation": (
        [lambda: check_explanation("x", "\u00e9" * MAX_EXPLANATION_CHARACTERS)],
        [lambda: check_explanation("x", "a" * (MAX_EXPLANATION_CHARACTERS + 1))],
    ),
    "natural": ([lambda: check_natural("x", 0)], [lambda: check_natural("x", -1)]),
    "number": (
        [lambda: check_number("x", 3, 3, 5), lambda: check_number("x", 5, 3, 5)],
        [lambda: check_number("x", 2, 3, 5), lambda: check_number("x", 6, 3, 5)],
    ),
    "range": (
        [lambda: check_range("x", 0.5, 0.5, 1.5), lambda: check_range("x", 1.5, 0.5, 1.5)],
        [lambda: check_range("x", 0.25, 0.5, 1.5), lambda: check_range("x", 1.75, 0.5, 1.5)],
    ),
    "entries": ([lambda: check_entries("x", "ab", 2)], [lambda: check_entries("x", "abc", 2)]),
    "streams": ([lambda: check_streams("x", [1, 2], 2, 2)], [lambda: check_streams("x", [1, 2], 3, 2)]),
}


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("what", BOUNDS)
def test_a_limit_is_allowed_and_no_more(what: str) -> None:
    allowed, refused = BOUNDS[what]
    for check in allowed:
        check()
    for check in refused:
        with pytest.raises(MalformedMessage):
            check()
