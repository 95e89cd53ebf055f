"""The table of all metrics of a node, from which exports, docs/metrics.md and tests are made."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class MetricType(StrEnum):
    """The types of Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class MetricDefinition(Struct, frozen=True):
    """One metric. `name` is without the `_total` that a counter is exported with."""

    name: str
    kind: MetricType
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported_names(self) -> tuple[str, ...]:
        """Return the names that a query may use."""
        match self.kind:
            case MetricType.COUNTER:
                return (f"{self.name}_total",)
            case MetricType.HISTOGRAM:
                return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
            case MetricType.GAUGE:
                return (self.name,)


def _define_gauge(name: str, help: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(f"sublet_{name}", MetricType.GAUGE, help, labels)


def _define_counter(name: str, help: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(f"sublet_{name}", MetricType.COUNTER, help, labels)


STREAM_LABELS = ("subscription", "space", "stream_id")

# --- the node --------------------------------------------------------------------------------------------------------

NODE = _define_gauge("node_info", "1, with the node's name, release and incarnation.", "node", "version", "incarnation")
HEALTH = _define_gauge("health_state", "1 for the state that a probe gets, 0 for the others.", "state")
CHECK = _define_gauge("health_check_ok", "1 if that check of the node is well, else 0.", "check")
DATABASE_UP = _define_gauge("database_up", "1 while the database answers this node, else 0.")
LEADERSHIPS = _define_gauge("leaderships", "Leaderships of this node, by their status.", "status")
LEADERLESS = _define_gauge(
    "groups_without_leader",
    "Groups of all nodes that have consumers and no leader, when last looked. Absent while the database is away.",
)
NOT_EXPORTED = _define_gauge(
    "groups_not_exported", "Groups not exported because of the limit, by missing series.", "series"
)
AGENTS = _define_gauge("agents", "Agents that are connected to this node.")
HELD_POLLS = _define_gauge("held_polls", "Polls of agents that the node holds at this moment.")
SUBSCRIBED_STREAMS = _define_gauge("subscribed_streams", "Streams whose heads agents of this node have subscribed to.")

# --- groups ----------------------------------------------------------------------------------------------------------

LAG = _define_gauge(
    "consumergroup_lag",
    "Messages between a group's position and the head of its stream. Absent where it is unknown, never 0 for it.",
    *STREAM_LABELS,
)
OFFSET = _define_gauge(
    "consumergroup_current_offset", "The group's durable position: the next offset to be consumed.", *STREAM_LABELS
)
HEAD = _define_gauge("stream_head_offset", "The offset that the stream's next message will have.", "space", "stream_id")
LAG_SUM = _define_gauge(
    "consumergroup_lag_sum", "A group's whole lag. Absent while a part of it is unknown.", "subscription"
)
LAG_KNOWN = _define_gauge("consumergroup_known_lag_sum", "The lag of those streams whose lag is known.", "subscription")
LAG_MAX = _define_gauge(
    "consumergroup_lag_max", "The largest known lag of a group's streams. Absent if none is.", "subscription"
)
UNKNOWN = _define_gauge(
    "consumergroup_unknown_lag_streams", "Streams of the group whose lag is unknown.", "subscription"
)
UNREADABLE_STREAMS = _define_gauge(
    "consumergroup_unreadable_streams",
    "Streams of the group whose holders cannot read on: what comes next lies outside of Postgres, damaged or away.",
    "subscription",
)
STREAMS = _define_gauge(
    "consumergroup_streams",
    "Streams of the group by the status of their rows. Those that are `finished` are not counted.",
    "subscription",
    "status",
)
MEMBERS = _define_gauge(
    "consumergroup_members",
    "Consumers that are connected to the group's leader; 0 of a group that has none.",
    "subscription",
)
PAUSED = _define_gauge("consumergroup_paused", "1 while an operator has paused the group, else 0.", "subscription")
TERM = _define_gauge("consumergroup_term", "The term under which this node leads the group.", "subscription")

# --- what has happened -----------------------------------------------------------------------------------------------

LENDINGS = _define_counter(
    "lending_events",
    "Lines of history that this node's leaders have written about streams: grants, revokes, moves, by their reason.",
    "subscription",
    "event",
    "reason",
    "forced",
)
MEMBERSHIP = _define_counter(
    "member_events", "Consumers that joined, left, were evicted or fenced.", "subscription", "event"
)
LEADING = _define_counter("leader_events", "Leaders that began here (takeover) or ended here (step_down).", "event")
INVARIANT_VIOLATIONS = _define_counter(
    "invariant_violations", "Leaders that ended because they broke a rule of their own: please report it."
)
COMMITS = _define_counter("commits", "Transactions of the node's leaders, by what became of them.", "outcome")
COMMITTED = _define_counter("committed_changes", "Changes of lending rows in the transactions that were committed.")
LATENCY = MetricDefinition(
    "sublet_database_request_seconds",
    MetricType.HISTOGRAM,
    "How long the database took to answer a request of the node's leaders.",
    ("request",),
)
FAILURES = _define_counter(
    "database_request_failures", "Requests of leaders that the database did not carry out.", "request"
)
PUBSUB_EVENTS = _define_counter("pubsub_events", "Events of the connections of this node and its agents.", "event")
NOTIFICATIONS = _define_counter(
    "notification_events", "Notifications of this node: what was received, missed and read again.", "event"
)
SCRAPE = _define_gauge(
    "scrape_duration_seconds", "How long the database took for the groups' metrics, when last asked."
)

METRIC_DEFINITIONS: tuple[MetricDefinition, ...] = tuple(
    each for each in tuple(globals().values()) if isinstance(each, MetricDefinition)
)
"""All of them, in this order."""
