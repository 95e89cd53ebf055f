"""What ended a task, as its driver gets it: plain data, of which nothing is made but text and errors of sublet's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sublet_borrower.consumer.runner import RunSummary
from sublet_borrower.spark.job.exception_transport import (
    MAX_LINKS,
    MAX_MESSAGE_CHARACTERS,
    MAX_TRACEBACK_CHARACTERS,
    TaskFailed,
    pack,
    unpack,
)
from sublet_borrower.spark.job.task import TaskAttempt, TaskSummary, decode_summary, encode_summary
from sublet_borrower.spark.job.task_reports import TaskReport, decode_report
from sublet_protocol.domain.errors import UsageError, UserFunctionFailed
from sublet_protocol.messages.head_and_group_events import GroupEventPayload


class Hostile(Exception):
    """Who unpickles it runs its code."""

    ran = False

    def __init__(self, text: str, number: int) -> None:
        self.number = number
        super().__init__(text)

    def __reduce__(self) -> Any:
        return setattr, (Hostile, "ran", True)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.conforms("X7")
def test_a_users_exception_is_named_and_not_made() -> None:
    cause = raised(Hostile("it broke", 7))
    found = unpack(pack(raised(UserFunctionFailed(3, 40, " (topic 't')", 2, "Hostile: it broke"), cause)))
    assert isinstance(found, UserFunctionFailed)
    assert (found.stream_id, found.offset) == (3, 40)
    assert str(found) == str(UserFunctionFailed(3, 40, " (topic 't')", 2, "Hostile: it broke"))
    named = found.__cause__
    assert isinstance(named, TaskFailed)
    assert (named.class_name, named.message) == (f"{__name__}.Hostile", "it broke")
    assert str(named) == f"{__name__}.Hostile: it broke"
    assert all("in raised" in note for error in (found, named) for note in error.__notes__)
    assert not Hostile.ran


@pytest.mark.conforms("X7")
@pytest.mark.parametrize(
    "name",
    [
        "builtins.ValueError",
        "os.system",
        "sublet_protocol.domain.errors.re",
        "sublet_protocol.domain.errors.",
        "sublet_protocol.domain.errors.Sequence",
    ],
)
def test_no_other_class_is_made(name: str) -> None:
    found = unpack(json.dumps([{"class": name, "message": "x", "traceback": ""}]))
    assert (type(found), str(found)) == (TaskFailed, f"{name}: x")


@pytest.mark.conforms("X7")
@pytest.mark.parametrize(
    "packed",
    ["", "{}", "[]", "[1]", "[{}]", "null", "[" * 100_000, '[{"class": "a", "message": "b"}]', "gASVBQAAAA=="],
    ids=lambda text: text[:8],
)
def test_what_is_no_failure_is_refused(packed: str) -> None:
    with pytest.raises(UsageError, match="not a task's failure"):
        unpack(packed)


def test_a_failure_is_bounded() -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        raise ValueError("x" * 10**6)

    error: BaseException | None = None
    for _ in range(2 * MAX_LINKS):
        try:
            deep(300)
        except ValueError as caught:
            caught.__cause__ = error
            error = caught
    assert error is not None
    error.__cause__ = error  # a circle, too
    packed = pack(error)
    assert len(json.loads(packed)) == MAX_LINKS
    assert len(packed) < 2 * MAX_LINKS * (MAX_MESSAGE_CHARACTERS + MAX_TRACEBACK_CHARACTERS)


def test_an_exception_without_a_text_is_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert "its text cannot be had: KeyError" in str(unpack(pack(Mute())))


def test_an_error_of_sublets_has_plain_fields() -> None:
    """Nothing that is private, and no object."""
    error = UsageError("no")
    vars(error).update(number=3, text="t", _hidden="h", listed=[1])
    found = unpack(pack(error))
    assert isinstance(found, UsageError)
    assert vars(found) == {"number": 3, "text": "t"}


@pytest.mark.conforms("X7")
def test_a_report_is_of_this_job_or_refused() -> None:
    report = TaskReport("s", 0, 1, "running")
    assert decode_report(report.encode("token"), "token") == report
    lone = GroupEventPayload(report.encode("token").payload.replace(b'"token": "token"', b'"token": "\\ud800"'))
    for message, token in (
        (report.encode("token"), "another"),
        (lone, "token"),
        (GroupEventPayload(b"{"), "token"),
        (report, "token"),
    ):
        with pytest.raises(UsageError, match=r"only (tasks of this job|its own tasks) speak here"):
            decode_report(message, token)


def test_a_summary_is_plain_data() -> None:
    summary = TaskSummary(TaskAttempt(1, 0, "s-p1"), RunSummary(messages=5), pack(ValueError("no")))
    assert decode_summary(encode_summary(summary)) == summary
    json.loads(encode_summary(summary))
    for bad in ("", "{}", '{"attempt": {}, "summary": {}, "failure": null}'):
        with pytest.raises(UsageError, match="not a task's summary"):
            decode_summary(bad)
