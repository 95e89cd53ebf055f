"""Adds up the flights of each hour, and closes the hours: `python -m examples.hourly_closing.consumer NAME`.

Any number of these share the work. What one adds is committed together with the group's progress; an hour that the
group has consumed is closed by whoever is notified of it first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter

import psycopg

from sublet import Batch, Session, errors
from sublet_protocol.domain.epoch_frontiers import GroupFrontier

SUBSCRIPTION = "$share/closing/flights/#"

TABLES = """
create table hour_part (hour bigint, stream bigint, flights bigint, miles bigint,
                        added_at timestamptz default clock_timestamp(), primary key (hour, stream));
create table closed_hour (hour bigint primary key, flights bigint, miles bigint, closed_by text,
                          closed_at timestamptz default clock_timestamp())"""

ADD = "insert into hour_part (hour, stream, flights, miles) values (%s, %s, %s, %s)"

CLOSE = """
insert into closed_hour (hour, flights, miles, closed_by)
select hour, sum(flights), sum(miles), %s from hour_part
 where hour < %s and hour not in (select hour from closed_hour) group by hour
    on conflict do nothing"""


def add(batch: Batch) -> None:
    """Commit what one stream has of some hours, all that it has of them, together with the progress."""
    flights, miles = Counter[int](), Counter[int]()
    for (hour,), value in zip(batch.table["epoch"].to_pylist(), batch.table["value"].to_pylist(), strict=True):
        flights[hour] += 1
        miles[hour] += int(value.rpartition(b",")[2])
    # If the grant is lost nothing is written: the stream is somebody else's by now, and so is this work.
    with contextlib.suppress(errors.GrantLost), batch.transaction() as connection:
        rows = [(hour, batch.stream_id, flights[hour], miles[hour]) for hour in flights]
        connection.cursor().executemany(ADD, rows)


def consume(name: str) -> None:
    """Until the process ends, in whatever way."""
    closing = psycopg.connect(os.environ["SUBLET_DATABASE_URL"], autocommit=True)

    def close_hours(group: GroupFrontier) -> None:
        for (hour,) in group.consumed.least:
            closing.execute(CLOSE, (name, hour))

    with Session(SUBSCRIPTION, whole_epochs=True, on_epochs_consumed=close_hours) as session:
        for batch in session:
            add(batch)


if __name__ == "__main__":
    consume(*sys.argv[1:])
