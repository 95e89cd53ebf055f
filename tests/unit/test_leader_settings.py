"""The leader's times: defaults, the bounds between them, scaling, environment."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import fields, replace

import pytest

from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.settings_base import CrossSettingRule

BREAKS: dict[str, dict[str, float]] = {
    "history_retention_s must be at least 60 times lease_duration_s": {"history_retention_s": 599.0},
    "statement_timeout_s must be less than lease_margin_s": {"statement_timeout_s": 1.0},
    "tcp_timeout_s must be less than lease_margin_s": {"tcp_timeout_s": 1.0},
    "lock_timeout_s must be less than statement_timeout_s": {"lock_timeout_s": 0.8},
    "lease_margin_s must be less than lease_duration_s - lease_renew_interval_s": {"lease_margin_s": 7.0},
    "lease_renew_interval_s must be at most a third of lease_duration_s": {"lease_renew_interval_s": 3.4},
    "eviction_timeout_s must be more than ping_timeout_s + resend_interval_s": {"eviction_timeout_s": 7.0},
    "reclaim_grace_s must be more than ping_timeout_s + resend_interval_s": {"reclaim_grace_s": 7.0},
    "ping_interval_s must be at most half of ping_timeout_s": {"ping_interval_s": 3.1},
    "poll_hold_s must be at most half of lease_duration_s": {"poll_hold_s": 5.1},
    "revoke_deadline_s must be more than ping_timeout_s + resend_interval_s": {"revoke_deadline_s": 7.0},
    "unsubscribe_timeout_s must be more than resend_interval_s": {"unsubscribe_timeout_s": 1.0},
    "rebalance_debounce_s must be at most rebalance_debounce_max_s": {"rebalance_debounce_s": 2.1},
    "leader_idle_timeout_s must be more than reclaim_grace_s": {"leader_idle_timeout_s": 10.0},
}


def test_the_defaults_are_valid() -> None:
    assert LeaderSettings().check() == LeaderSettings()


def test_every_rule_has_a_counterexample_here() -> None:
    assert BREAKS.keys() == {rule.text for rule in LeaderSettings.RULES}


@pytest.mark.parametrize("rule", LeaderSettings.RULES, ids=lambda rule: rule.names[0])
def test_breaking_a_rule_names_values_rule_and_remedy(rule: CrossSettingRule) -> None:
    broken = replace(LeaderSettings(), **BREAKS[rule.text])
    with pytest.raises(InvalidSetting) as caught:
        broken.check()
    message = str(caught.value)
    assert rule.text in message
    assert rule.hint in message
    for name in rule.names:
        assert f"{name} is {getattr(broken, name)}" in message


@pytest.mark.conforms("E10", "E11", "E16")
@pytest.mark.parametrize("name", ["eviction_timeout_s", "reclaim_grace_s", "revoke_deadline_s"])
def test_a_leaders_word_is_good_for_less_than_whatever_gives_a_stream_to_others_by_force(name: str) -> None:
    settings = replace(LeaderSettings(), **{name: 7.5}).check()
    assert settings.ping_timeout_s < settings.ping_valid_for_s < 7.5 * 0.9


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", [field.name for field in fields(LeaderSettings)])
def test_each_is_a_positive_finite_time(name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} is {value}: it must be a positive"):
        replace(LeaderSettings(), **{name: value}).check()


@pytest.mark.parametrize("factor", [3.0, 7.0, 10.0, 13.7, 100.0])
def test_scaled_settings_keep_their_proportions_and_stay_valid(factor: float) -> None:
    fast = LeaderSettings().scaled(factor).check()
    for field in fields(fast):
        assert getattr(fast, field.name) == getattr(LeaderSettings(), field.name) / factor


def test_the_environment_overrides_and_is_checked() -> None:
    found = LeaderSettings.from_env({"SUBLET_LEASE_DURATION_S": "20", "SUBLET_POLL_HOLD_S": "7.5", "SUBLET_OTHER": "x"})
    assert found == replace(LeaderSettings(), lease_duration_s=20.0, poll_hold_s=7.5)
    with pytest.raises(
        InvalidSetting,
        match=r"lease_renew_interval_s is 9.0 and lease_duration_s is 10.0|lease_duration_s is 10.0 and "
        "lease_renew_interval_s is 9.0",
    ):
        LeaderSettings.from_env({"SUBLET_LEASE_RENEW_INTERVAL_S": "9"})


def test_the_environment_is_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_LEADER_IDLE_TIMEOUT_S", "90")
    assert LeaderSettings.from_env().leader_idle_timeout_s == 90.0


def test_a_word_for_a_number_is_refused_by_the_variables_name() -> None:
    with pytest.raises(
        InvalidSetting, match=r"_DURATION_S is 'ten': it must be a positive number\. Leave it out for 10\.0\.$"
    ):
        LeaderSettings.from_env({"SUBLET_LEASE_DURATION_S": "ten"})


def test_every_setting_says_what_it_is() -> None:
    tree = ast.parse(inspect.getsource(LeaderSettings))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), ast.unparse(field)
            assert isinstance(text.value, ast.Constant), ast.unparse(field)
