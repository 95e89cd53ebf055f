"""OpenTelemetry traces through streams: `pip install 'sublet[traces]'`, see docs/traces.md.

    publisher.publish("orders/eu", value, headers=traces.trace_headers())

    for batch in session:
        with traces.batch_span(batch):
            ...

Names of spans and attributes are those of OpenTelemetry's semantic conventions for messaging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sublet._version import __version__
from sublet_borrower.streams.batch import Batch
from sublet_storage.producer.batches.input_conversion import Headers, as_headers

try:
    from opentelemetry import trace
    from opentelemetry.trace import Link, SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"sublet.traces needs the package {missing.name}: pip install 'sublet[traces]'.", name=missing.name
    ) from None

MAX_LINKS: Final = 64
"""Maximum number of its messages' contexts that a span has as links; it also has their number."""

_PROPAGATOR = TraceContextTextMapPropagator()
_PARENT: Final = "traceparent"

_T = TypeVar("_T")


def trace_headers(more: Headers | None = None) -> list[tuple[str, bytes | None]]:
    """Return `more`, and the current span's context as a message header (W3C Trace Context); `more` alone outside of a
    span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    headers = [(str(name), value) for name, value in as_headers(more) or () if name not in carrier]
    return headers + [(name, value.encode()) for name, value in carrier.items()]


@contextmanager
def batch_span(batch: Batch, group: str | None = None) -> Iterator[trace.Span]:
    """Open a span around the work on a batch, linked to the spans in which its messages were published. An exception is
    recorded in it and raised. `group`: the subscription, to be shown."""
    contexts = _read_contexts(batch.table)
    links = [link for link in map(_make_link, contexts[:MAX_LINKS]) if link is not None]
    attributes: dict[str, str | int] = {
        "messaging.system": "sublet",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.batch.message_count": len(batch),
        "messaging.destination.partition.id": str(batch.stream_id),
        "sublet.first_offset": batch.first,
        "sublet.end_offset": batch.end,
        "sublet.grant_id": batch.grant_id,
        "sublet.contexts": len(contexts),
    }
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    tracer = trace.get_tracer("sublet", __version__)
    name = "process" if group is None else f"process {group}"
    with tracer.start_as_current_span(name, kind=SpanKind.CONSUMER, links=links, attributes=attributes) as span:
        yield span


def traced(fn: Callable[[Batch], _T], group: str | None = None) -> Callable[[Batch], _T]:
    """Return the function with a `batch_span` around each call: `consume(spark, subscription, traced(fn), ...)`."""
    return partial(_call, fn, group)


def _call(fn: Callable[[Batch], _T], group: str | None, batch: Batch) -> _T:
    with batch_span(batch, group):
        return fn(batch)


def _read_contexts(table: pa.Table) -> list[bytes]:
    """Return the distinct contexts in the messages' headers, in their order."""
    pairs: Any = pc.list_flatten(table.column("headers"))
    values = pc.struct_field(pairs, "value").filter(pc.equal(pc.struct_field(pairs, "key"), _PARENT))
    return [value for value in values.unique().to_pylist() if value is not None]


def _make_link(context: bytes) -> Link | None:
    """Return the link to a context; None if it is invalid."""
    carrier = {_PARENT: context.decode("ascii", "replace")}
    span = trace.get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return Link(span) if span.is_valid else None
