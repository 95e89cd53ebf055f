"""Whole numbers among the settings; the times are with their classes."""

from __future__ import annotations

import pytest

from sublet_leader.observe.settings import MetricsSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.settings_base import parse_number


def test_an_integer_setting_may_be_none() -> None:
    assert MetricsSettings.from_env({"SUBLET_HTTP_LAG_HISTORY_MINUTES": "0"}) == MetricsSettings(lag_history_minutes=0)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "1000000000", "9" * 5000])
def test_a_setting_that_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^SUBLET_HTTP_MAX_GROUP_SERIES is .*: it must be a whole number from 0 "):
        MetricsSettings.from_env({"SUBLET_HTTP_MAX_GROUP_SERIES": text})
    with pytest.raises(InvalidSetting, match=r"Leave it out for 2000\.$"):
        MetricsSettings.from_env({"SUBLET_HTTP_MAX_GROUP_SERIES": text})


def test_an_integer_given_in_python_is_checked() -> None:
    with pytest.raises(InvalidSetting, match=r"^max_group_series is -1: it must be a whole number from 0"):
        MetricsSettings(max_group_series=-1).check()


def test_a_bound_of_its_own() -> None:
    assert parse_number("PLACES", "1000", 8, 1000) == 1000
    with pytest.raises(
        InvalidSetting, match=r"^PLACES is 1001: it must be a whole number from 0 to 1000\. Leave it out"
    ):
        parse_number("PLACES", "1001", 8, 1000)
