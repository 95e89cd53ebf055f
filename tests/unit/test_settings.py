"""Settings of leaders, consumers, notifications, metrics: defaults, the bounds between them, scaling, environment."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from sublet_borrower.settings import BorrowerSettings
from sublet_leader.observe.metrics_settings import MetricsSettings
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.settings_base import MAX_INT, CrossSettingRule, SettingsBase, check_number, parse_number
from sublet_storage.notify.changes import NotifySettings

TIMES = [LeaderSettings(), BorrowerSettings(), NotifySettings()]
BREAKS: dict[str, dict[str, float]] = {
    "history_retention_s must be at least 60 times lease_duration_s": {"history_retention_s": 599.0},
    "statement_timeout_s must be less than lease_margin_s": {"statement_timeout_s": 1.0},
    "tcp_timeout_s must be less than lease_margin_s": {"tcp_timeout_s": 1.0},
    "lock_timeout_s must be less than statement_timeout_s": {"lock_timeout_s": 0.8},
    "lease_margin_s must be less than lease_duration_s - lease_renew_interval_s": {"lease_margin_s": 7.0},
    "lease_renew_interval_s must be at most a third of lease_duration_s": {"lease_renew_interval_s": 3.4},
    "lock_recheck_delay_s must be at most lock_check_interval_s": {"lock_recheck_delay_s": 0.3},
    "lock_check_interval_s must be less than an eighth of lease_duration_s": {"lock_check_interval_s": 1.25},
    "reconnect_grace_s must be less than eviction_timeout_s": {"reconnect_grace_s": 10.0},
    "eviction_timeout_s must be more than ping_timeout_s + resend_interval_s": {"eviction_timeout_s": 7.0},
    "reclaim_grace_s must be more than ping_timeout_s + resend_interval_s": {"reclaim_grace_s": 7.0},
    "ping_interval_s must be at most half of ping_timeout_s": {"ping_interval_s": 3.1},
    "poll_hold_s must be at most half of lease_duration_s": {"poll_hold_s": 5.1},
    "revoke_deadline_s must be more than ping_timeout_s + resend_interval_s": {"revoke_deadline_s": 7.0},
    "unsubscribe_timeout_s must be more than resend_interval_s": {"unsubscribe_timeout_s": 1.0},
    "rebalance_debounce_s must be at most rebalance_debounce_max_s": {"rebalance_debounce_s": 2.1},
    "leader_idle_timeout_s must be more than reclaim_grace_s": {"leader_idle_timeout_s": 10.0},
    "ping_timeout_s must be more than ping_interval_s + resend_interval_s": {"ping_timeout_s": 3.0},
    "lock_confirm_interval_s must be at most half of lock_valid_s": {"lock_confirm_interval_s": 0.4},
    "hello_interval_s must be at least gap_window_s": {"gap_window_s": 6.0},
    "publisher_expiry_s must be at least hello_interval_s + gap_window_s": {"publisher_expiry_s": 5.0},
    "tombstone_retention_s must be at least hello_interval_s + gap_window_s": {"tombstone_retention_s": 1.0},
    "poll_interval_s must be at least catch_up_min_interval_s": {"poll_interval_s": 0.1},
    "catch_up_interval_s must be at least poll_interval_s": {"catch_up_interval_s": 0.9},
}


def kind(settings: object) -> str:
    return type(settings).__name__


@pytest.mark.parametrize("settings", TIMES, ids=kind)
def test_the_defaults_are_valid(settings: SettingsBase) -> None:
    assert settings.check() is settings


def test_the_defaults_of_consumers_fit_the_leaders() -> None:
    defaults, leader = asdict(BorrowerSettings()), asdict(LeaderSettings())
    same = ("ping_interval_s", "ping_timeout_s", "resend_interval_s", "unsubscribe_timeout_s")
    assert [defaults[name] for name in same] == [leader[name] for name in same]
    assert defaults["disconnect_timeout_s"] == leader["lease_duration_s"]


def test_every_rule_has_a_counterexample_here() -> None:
    assert BREAKS.keys() == {rule.text for settings in TIMES for rule in settings.RULES}


@pytest.mark.parametrize(
    ("settings", "rule"), [pytest.param(settings, rule, id=rule.text) for settings in TIMES for rule in settings.RULES]
)
def test_a_broken_rule_is_named(settings: SettingsBase, rule: CrossSettingRule) -> None:
    """With its values and a hint."""
    changes: dict[str, Any] = BREAKS[rule.text]
    broken = replace(settings, **changes)
    with pytest.raises(InvalidSetting) as caught:
        broken.check()
    values = " and ".join(f"{name} is {getattr(broken, name)}" for name in rule.names)
    assert str(caught.value) == f"{values}: {rule.text}, because {rule.reason}. {rule.hint}."


def test_what_is_just_allowed() -> None:
    """Two looks in the time that a lock is valid, no and the greatest number, and a lock that is short at its bound."""
    borrower, leader = BorrowerSettings(), LeaderSettings()
    replace(borrower, lock_confirm_interval_s=borrower.lock_valid_s / 2).check()
    for number in (0, MAX_INT):
        check_number("number", number, default=1)
    times = 0.0, leader.max_lock_valid_s, math.nextafter(leader.max_lock_valid_s, math.inf)
    assert [leader.is_lock_short(valid_s) for valid_s in times] == [False, True, False]


@pytest.mark.conforms("E10", "E11", "E16")
@pytest.mark.parametrize("name", ["eviction_timeout_s", "reclaim_grace_s", "revoke_deadline_s"])
def test_a_lease_ends_before_streams_are_taken(name: str) -> None:
    """Before whatever gives a stream to others by force."""
    settings = replace(LeaderSettings(), **{name: 7.5}).check()
    assert settings.ping_timeout_s < settings.ping_valid_for_s < 7.5 * 0.9


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("settings", TIMES, ids=kind)
def test_each_is_a_positive_finite_time(settings: SettingsBase, value: float) -> None:
    for field in fields(settings):
        wrong: dict[str, Any] = {field.name: value}
        with pytest.raises(InvalidSetting, match=f"^{field.name} is {value}: it must be a positive number. Leave it"):
            replace(settings, **wrong).check()


@pytest.mark.parametrize("factor", [3.0, 7.0, 10.0, 13.7, 100.0])
def test_scaled_settings_keep_their_proportions(factor: float) -> None:
    for settings in (LeaderSettings(), BorrowerSettings()):
        fast = asdict(settings.scaled(factor).check())
        assert fast == {name: value / factor for name, value in asdict(settings).items()}
    notify = NotifySettings().scaled(factor).check()
    assert (notify.hello_interval_s, notify.max_sends_per_s) == (5.0 / factor, 200.0 * factor)


def test_every_setting_is_described() -> None:
    tree = ast.parse(inspect.getsource(LeaderSettings))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), ast.unparse(field)
            assert isinstance(text.value, ast.Constant), ast.unparse(field)


# --- the environment --------------------------------------------------------------------------------------------------


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LeaderSettings.from_env({"SUBLET_LEASE_DURATION_S": "20", "SUBLET_POLL_HOLD_S": "7.5", "SUBLET_OTHER": "x"})
    assert found == replace(LeaderSettings(), lease_duration_s=20.0, poll_hold_s=7.5)
    for name, value in asdict(BorrowerSettings()).items():
        changed = replace(BorrowerSettings(), **{name: value * 1.25})
        assert BorrowerSettings.from_env({f"SUBLET_{name.upper()}": str(value * 1.25)}) == changed
    assert NotifySettings.from_env({"SUBLET_NOTIFY_POLL_INTERVAL_S": "2.5"}) == NotifySettings(poll_interval_s=2.5)
    assert MetricsSettings.from_env({"SUBLET_HTTP_LAG_HISTORY_MINUTES": "0"}) == MetricsSettings(lag_history_minutes=0)
    monkeypatch.setenv("SUBLET_LEADER_IDLE_TIMEOUT_S", "90")
    assert LeaderSettings.from_env().leader_idle_timeout_s == 90.0


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "1000000000", "9" * 5000])
def test_what_is_no_integer_is_refused(text: str) -> None:
    """Also where it is given in Python; it may have a bound of its own."""
    rule = r"^SUBLET_HTTP_MAX_GROUP_SERIES is .*: it must be a whole number from 0 .*Leave it out for 2000\.$"
    with pytest.raises(InvalidSetting, match=rule):
        MetricsSettings.from_env({"SUBLET_HTTP_MAX_GROUP_SERIES": text})
    with pytest.raises(InvalidSetting, match=r"^max_group_series is -1: it must be a whole number from 0"):
        MetricsSettings(max_group_series=-1).check()
    assert parse_number("PLACES", "1000", 8, 1000) == 1000
    with pytest.raises(InvalidSetting, match=r"^PLACES is 1001: it must be a whole number from 0 to 1000\. Leave it"):
        parse_number("PLACES", "1001", 8, 1000)


@pytest.mark.parametrize(
    ("settings", "variable", "text", "reported"),
    [
        (LeaderSettings, "SUBLET_LEASE_DURATION_S", "ten", "SUBLET_LEASE_DURATION_S is 'ten': it must be a positive"),
        (NotifySettings, "SUBLET_NOTIFY_POLL_INTERVAL_S", "-1", "SUBLET_NOTIFY_POLL_INTERVAL_S is -1.0: it must be a"),
        (LeaderSettings, "SUBLET_LEASE_RENEW_INTERVAL_S", "9", "lease_renew_interval_s is 9.0: lease_margin_s must"),
        *(
            (BorrowerSettings, "SUBLET_PING_INTERVAL_S", text, f"is {text!r}: it must be a positive number. Leave it")
            for text in ("", "2s", "1,5")
        ),
        (BorrowerSettings, "SUBLET_PING_INTERVAL_S", "nan", "it must be a positive"),
        (BorrowerSettings, "SUBLET_PING_INTERVAL_S", "7", "Raise ping_timeout_s"),
    ],
)
def test_the_environment_is_checked(settings: type[SettingsBase], variable: str, text: str, reported: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        settings.from_env({variable: text})
    assert reported in str(refused.value)
