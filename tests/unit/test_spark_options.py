"""The options of `format("sublet")`: what is understood, and what is refused by name."""

from __future__ import annotations

import pytest

from sublet_borrower.spark.common.options import StreamOptions, stream_options
from sublet_protocol.domain.errors import InvalidSetting, InvalidSubscription

LEAST = {"subscription": "$share/g/#", "sessionName": "etl"}


def test_the_least_there_is() -> None:
    assert stream_options(LEAST) == StreamOptions("$share/g/#", "etl")


def test_everything_and_in_any_case() -> None:
    given = {
        "SUBSCRIPTION": "$queue/q/a",
        "sessionname": "etl",
        "url": "postgresql://here/db",
        "Nodes": "a:1, b:2",
        "startingposition": "offset:3",
        "weight": "2.5",
        "maxOffsetsPerTrigger": "10",
        "maxBytesPerTrigger": "20",
        "minPartitions": "4",
        "maxPartitions": "8",
        "wholeEpochs": "true",
        "inDoubtTimeout": "5 minutes",
        "onRangeLost": "fail",
        "failOnDataLoss": "FALSE",
        "availableNowWait": "1m",
    }
    assert stream_options(given) == StreamOptions(
        "$queue/q/a",
        "etl",
        "postgresql://here/db",
        None,
        ("a:1", "b:2"),
        "offset:3",
        2.5,
        10,
        20,
        4,
        8,
        True,
        300.0,
        "fail",
        False,
        60.0,
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90 s", 90.0), ("1.5 minutes", 90.0), ("2m", 120.0), ("1 hour", 3600.0), ("250ms", 0.25), ("0", 0)],
)
def test_times(text: str, seconds: float) -> None:
    assert stream_options({**LEAST, "inDoubtTimeout": text}).in_doubt_timeout == seconds


@pytest.mark.parametrize("missing", LEAST)
def test_what_must_be_there_is_asked_for(missing: str) -> None:
    with pytest.raises(InvalidSetting, match=f"option {missing} is missing. Give"):
        stream_options({name: value for name, value in LEAST.items() if name != missing})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kafka.bootstrap.servers": "x"}, "option 'kafka.bootstrap.servers': readStream has none of that name. It ha"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger is '0': it is a whole number from 1 to 46"),
        ({"maxOffsetsPerTrigger": "9" * 5000}, "9999': it is a whole number from 1 to 46"),
        ({"maxOffsetsPerTrigger": "ten"}, "option maxOffsetsPerTrigger is 'ten'"),
        ({"maxBytesPerTrigger": "-1"}, "option maxBytesPerTrigger is '-1'"),
        ({"minPartitions": "1.5"}, "option minPartitions is '1.5'"),
        ({"maxPartitions": "0"}, "option maxPartitions is '0': it is a whole number from 1 to 46"),
        (
            {"minPartitions": "4", "maxPartitions": "3"},
            "minPartitions 4 and maxPartitions 3: no number",
        ),
        ({"inDoubtTimeout": "soon"}, "option inDoubtTimeout is 'soon': it is a time, such as 90"),
        ({"inDoubtTimeout": "5 fortnights"}, "option inDoubtTimeout is '5 fortnights'"),
        ({"inDoubtTimeout": "-5"}, "option inDoubtTimeout is '-5'"),
        ({"onRangeLost": "read"}, "option onRangeLost is 'read': it is drop or fail"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss is 'maybe': it is true or false"),
        ({"weight": "heavy"}, "option weight is 'heavy'"),
        ({"weight": "0"}, "weight is 0.0: it must be above 0"),
        ({"startingPosition": "first"}, "start"),
        ({"nodes": "here"}, "node 'here': a leader node's address is HOST:PORT"),
        ({"sessionName": ""}, "option sessionName is empty"),
        ({"sessionName": "x" * 600}, "option sessionName: name is"),
        ({"url": "postgresql://x/y", "dataDir": "/z"}, "options url and dataDir: they are two databases"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        stream_options({**LEAST, **given})
    assert said in str(refused.value)


def test_a_subscription_is_one() -> None:
    with pytest.raises(InvalidSubscription):
        stream_options({**LEAST, "subscription": "orders"})
