"""The numbers that a reset, and a file of progress, may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_storage.groups.admin.progress_transfer import progress_from_json
from sublet_storage.groups.admin.reset_target import ResetTarget

SHIFT, OFFSET, GIVEN = ResetTarget.shift, ResetTarget.offset, ResetTarget.offsets


@pytest.mark.conforms("A9")
@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (OFFSET, [0, MAX_OFFSET], [-1, MAX_OFFSET + 1]),
        (SHIFT, [-MAX_OFFSET, MAX_OFFSET], [-MAX_OFFSET - 1, MAX_OFFSET + 1]),
        (GIVEN, [{1: 0}, {MAX_OFFSET: MAX_OFFSET}], [{0: 0}, {MAX_OFFSET + 1: 0}, {1: -1}, {1: MAX_OFFSET + 1}]),
    ],
    ids=["offset", "shift", "given"],
)
def test_a_target_names_numbers_that_there_are(make: Callable[[Any], ResetTarget], good: Any, bad: Any) -> None:
    for value in good:
        make(value)
    for value in bad:
        with pytest.raises(UsageError):
            make(value)


def test_a_file_of_progress_has_offsets_in_bounds() -> None:
    def read(after_generation: int) -> int:
        document = {"after_generation": after_generation, "streams": [], "epochs": []}
        return progress_from_json(document).after_generation

    assert [read(number) for number in (0, MAX_OFFSET)] == [0, MAX_OFFSET]
    for number in (-1, MAX_OFFSET + 1):
        with pytest.raises(ValueError, match="is no whole number from 0 to"):
            read(number)
