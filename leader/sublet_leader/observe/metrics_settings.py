"""Bounds of the metrics and of the lag history."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.domain.settings_base import SettingsBase


@dataclass(frozen=True, slots=True)
class MetricsSettings(SettingsBase):
    """Whole numbers, every one."""

    PREFIX = "SUBLET_HTTP_"

    max_stream_series: int = 2000
    """Most series of single streams of groups that a node exports; groups beyond them have only their sums."""
    max_group_series: int = 2000
    """Most groups of which a node exports metrics; of the others it exports how many they are."""
    lag_history_minutes: int = 30
    """For how long a node stores how far behind groups were, for the lag history of its page; 0: not at all."""
    lag_history_max_groups: int = 10000
    """Most groups whose lag history a node stores."""
