"""The options of `spark.read.format("sublet")`: what is understood, and what is refused by name."""

from __future__ import annotations

import pytest

from sublet_borrower.spark.source.batch_options import BatchOptions, batch_options
from sublet_protocol.domain.epochs import LARGEST, SMALLEST
from sublet_protocol.domain.errors import InvalidFilter, InvalidSetting
from sublet_protocol.domain.subscriptions import StartingPosition

TIME = "2026-11-21T10:00:00Z"


def test_nothing_needs_to_be_said() -> None:
    options = batch_options({})
    assert options == BatchOptions()
    assert (options.start, options.end, options.epochs) == (StartingPosition.EARLIEST, StartingPosition.LATEST, None)


def test_everything_and_in_any_case() -> None:
    given = {
        "FILTER": "orders/#",
        "url": "postgresql://here/db",
        "space": "eu",
        "startingposition": TIME,
        "endingPosition": "offset:7",
        "startingEpoch": "-3",
        "endingEpoch": "12",
        "minpartitions": "4",
        "maxPartitions": "8",
        "failOnDataLoss": "False",
        "pushDownPredicate": "true",
    }
    options = batch_options(given)
    expected = BatchOptions("orders/#", "postgresql://here/db", None, "eu", TIME, "offset:7", -3, 12, 4, 8, False, True)
    assert options == expected
    assert (str(options.start), options.end, options.epochs) == (TIME, StartingPosition.at_offset(7), (-3, 12))


def test_epochs_without_one_end_go_on() -> None:
    assert batch_options({"startingEpoch": "5"}).epochs == (5, LARGEST + 1)
    assert batch_options({"endingEpoch": "5"}).epochs == (SMALLEST, 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "x"}, "option 'path': read has none of that name. It has: filter, url"),
        (
            {"subscription": "$share/g/#"},
            "option subscription: it is readStream's. History is read without a group. Gi",
        ),
        ({"SessionName": "a"}, "option sessionName: it is readStream's. History is read without a group. Leave it out"),
        ({"maxoffsetspertrigger": "5"}, "endingPosition says how far to read"),
        ({"nodes": "here:1"}, "option nodes: it is readStream's"),
        ({"startingPosition": "latest"}, "option startingPosition is 'latest': it is earliest, a time with its zone"),
        ({"startingPosition": "2026-11-21"}, "option startingPosition is '2026-11-21'"),
        ({"startingPosition": "offset:-1"}, "option startingPosition is 'offset:-1'"),
        ({"endingPosition": "earliest"}, "option endingPosition is 'earliest': it is latest, a time with its zone"),
        ({"startingPosition": "offset:5", "endingPosition": "offset:5"}, "nothing lies between them"),
        ({"startingPosition": TIME, "endingPosition": "2026-11-21T10:30:00+01:00"}, "nothing lies between them"),
        ({"endingEpoch": "3", "startingEpoch": "3"}, "options startingEpoch 3 and endingEpoch 3: nothing lies between"),
        ({"startingEpoch": "1.5"}, "option startingEpoch is '1.5': it is an epoch of one number"),
        ({"endingEpoch": str(2**64)}, f"option endingEpoch is '{2**64}'"),
        ({"minPartitions": "0"}, "option minPartitions is '0': it is a whole number from 1 to 46"),
        (
            {"minPartitions": "4", "maxPartitions": "3"},
            "minPartitions 4 and maxPartitions 3: no number",
        ),
        ({"pushDownPredicate": "all"}, "option pushDownPredicate is 'all': it is true or false"),
        ({"space": ""}, "option space is empty"),
        ({"url": "postgresql://x/y", "dataDir": "/z"}, "options url and dataDir: they are two databases"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        batch_options(given)
    assert said in str(refused.value)


def test_a_filter_is_one() -> None:
    with pytest.raises(InvalidFilter, match="filter 'a#'"):
        batch_options({"filter": "a#"})
