"""Traces through streams, from a real publisher to a real session: what messages bear, and what a batch's span says."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sublet import traces
from sublet_borrower.consumer.runner import run
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.kit_nodes import SPEED, Fleet

GROUP = "$share/g/#"
EXPORTED = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def _provider() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    trace.set_tracer_provider(provider)


@pytest.fixture
def url(database: str, fleet: Fleet) -> str:
    """A database with a single open stream, and a node; no span is left of before."""
    EXPORTED.clear()
    with connect(database) as connection:
        reshard(connection, "default", 1)
        connection.execute("delete from stream where state <> 'open'")
    fleet.nodes["n1"].await_serving()
    return database


def consume(url: str, count: int, fn: Callable[[Batch], object]) -> None:
    """So many messages, by a function that may raise once."""
    seen = 0

    def work(batch: Batch) -> None:
        nonlocal seen
        fn(batch)
        seen += len(batch)
        if seen >= count:
            session.drain()

    settings = BorrowerSettings().scaled(SPEED)
    with Session(GROUP, url, settings=settings, starting_position="earliest", auto_ack=False) as session:
        run(session, work)


def publish_in_spans(url: str, count: int) -> list[int]:
    """Messages, each in a span of its own; the spans' ids. One more has none."""
    ids = []
    with Publisher(url) as publisher:
        for number in range(count):
            with trace.get_tracer("test").start_as_current_span("order", kind=trace.SpanKind.PRODUCER) as span:
                publisher.publish("t", str(number), key="k", headers=traces.trace_headers({"colour": b"red"}))
                ids.append(span.get_span_context().span_id)
        publisher.publish("t", "none", key="k", headers=traces.trace_headers())
    return ids


def of_batches() -> list[ReadableSpan]:
    return [span for span in EXPORTED.get_finished_spans() if span.kind is trace.SpanKind.CONSUMER]


def test_a_batchs_span_is_linked_to_its_messages(url: str) -> None:
    """The links are to the spans in which they were published."""
    published = publish_in_spans(url, 5)
    current: list[int] = []

    def work(batch: Batch) -> None:
        current.append(trace.get_current_span().get_span_context().span_id)

    consume(url, 6, traces.traced(work, GROUP))
    spans = of_batches()
    assert [link.context.span_id for span in spans for link in span.links] == published
    assert [span.context.span_id for span in spans] == current
    first, last = spans[0].attributes or {}, spans[-1].attributes or {}
    assert spans[0].name == f"process {GROUP}"
    assert (first["messaging.system"], first["messaging.consumer.group.name"]) == ("sublet", GROUP)
    assert (first["sublet.first_offset"], last["sublet.end_offset"]) == (0, 6)
    assert sum((span.attributes or {})["messaging.batch.message_count"] for span in spans) == 6  # type: ignore[misc]


def test_an_error_is_in_the_span_and_goes_on(url: str) -> None:
    publish_in_spans(url, 1)
    failed: list[Batch] = []

    def work(batch: Batch) -> None:
        if not failed:
            failed.append(batch)
            raise ValueError("no such order")

    consume(url, 2, traces.traced(work))
    spans = of_batches()
    assert [span.status.is_ok for span in spans] == [False, *[True] * (len(spans) - 1)]
    assert spans[0].events[0].attributes["exception.message"] == "no such order"  # type: ignore[index]


def test_of_many_contexts_all_are_counted(url: str) -> None:
    """Only some of them are linked."""
    count = traces.MAX_LINKS + 10
    contexts = [f"00-{'a' * 32}-{number:016x}-01".encode() for number in range(1, count)] + [b"\xff no context"]
    with Publisher(url) as publisher:  # a block, and so a batch
        headers = [[("traceparent", context)] for context in contexts]
        publisher.publish_batch({"topic": "t", "key": "k", "value": [b"x"] * count, "headers": headers})
    consume(url, count, traces.traced(lambda batch: None))
    (span,) = of_batches()
    assert (span.attributes or {})["sublet.contexts"] == count
    assert [link.context.span_id for link in span.links] == list(range(1, traces.MAX_LINKS + 1))


def test_headers_keep_what_they_are_given() -> None:
    """Outside of a span nothing is added to them."""
    assert traces.trace_headers() == []
    assert traces.trace_headers({"a": b"1", "traceparent": b"theirs"}) == [("a", b"1"), ("traceparent", b"theirs")]
    with trace.get_tracer("test").start_as_current_span("one") as span:
        found = traces.trace_headers([("a", b"1"), ("a", None), ("traceparent", b"theirs")])
    assert found[:2] == [("a", b"1"), ("a", None)]
    assert [name for name, _ in found].count("traceparent") == 1
    assert f"{span.get_span_context().span_id:016x}" in str(found[-1])


def test_a_traced_function_travels_to_an_executor() -> None:
    assert pickle.loads(pickle.dumps(traces.traced(len, GROUP))).args[1] == GROUP


def test_without_the_package_it_is_said_what_to_do() -> None:
    program = (
        "import sys\nsys.modules['opentelemetry'] = None\nimport sublet\ntry:\n    sublet.traces\n"
        "except ModuleNotFoundError as missing:\n    print(missing)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'sublet[traces]'" in said
