"""The borrower's times: defaults, the bound between them, scaling, environment."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

from sublet_borrower.settings import BorrowerSettings
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting

NAMES = [field.name for field in fields(BorrowerSettings)]


def test_the_defaults_are_those_of_the_leader() -> None:
    defaults, leader = BorrowerSettings().check(), asdict(LeaderSettings())
    for name in ("ping_interval_s", "ping_timeout_s", "resend_interval_s", "unsubscribe_timeout_s"):
        assert getattr(defaults, name) == leader[name]
    assert defaults.disconnect_timeout_s == leader["lease_duration_s"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_each_is_a_positive_finite_time(value: float) -> None:
    for name in NAMES:
        with pytest.raises(InvalidSetting, match=f"{name} is {value}: it must be a positive"):
            replace(BorrowerSettings(), **{name: value}).check()


@pytest.mark.parametrize("timeout_s", [2.9, 3.0])
def test_a_single_lost_ping_must_not_cost_the_leader(timeout_s: float) -> None:
    settings = BorrowerSettings(ping_interval_s=2.0, resend_interval_s=1.0, ping_timeout_s=timeout_s)
    said = (
        f"ping_timeout_s is {timeout_s} and ping_interval_s is 2.0 and resend_interval_s is 1.0: .*Raise ping_timeout_s"
    )
    with pytest.raises(InvalidSetting, match=said):
        settings.check()
    replace(settings, ping_timeout_s=3.1).check()


def test_a_look_at_the_lock_may_take_its_time() -> None:
    with pytest.raises(InvalidSetting, match=r"lock_confirm_interval_s is 0\.4 and lock_valid_s is 0\.7: "):
        BorrowerSettings(lock_confirm_interval_s=0.4).check()


def test_scaling_keeps_the_proportions() -> None:
    scaled = asdict(BorrowerSettings().scaled(4.0).check())
    assert scaled == {name: value / 4.0 for name, value in asdict(BorrowerSettings()).items()}


def test_each_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BorrowerSettings.from_env() == BorrowerSettings()
    for name in NAMES:
        value = getattr(BorrowerSettings(), name) * 1.25
        with monkeypatch.context() as environment:
            environment.setenv(f"SUBLET_{name.upper()}", str(value))
            assert BorrowerSettings.from_env() == replace(BorrowerSettings(), **{name: value})


@pytest.mark.parametrize(
    ("text", "said"),
    [(text, f"is {text!r}: it must be a positive number. Leave it out for 2.0") for text in ("", "soon", "2s", "1,5")]
    + [("-2", "positive"), ("nan", "positive"), ("7", "Raise ping_timeout_s")],
)
def test_what_the_environment_has_is_checked(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setenv("SUBLET_PING_INTERVAL_S", text)
    with pytest.raises(InvalidSetting, match=f"(?i)ping_interval_s .*{said}"):
        BorrowerSettings.from_env()
