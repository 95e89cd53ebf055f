"""A consumer that stops in its commit: `python -m tests.processes.committing URL GROUP STREAM GRANT KEY SIGNAL`.

Writes a row to the table `output` and moves progress to offset 3, says `complete_advance`, and sends itself SIGNAL
before its COMMIT. Exit code 0 if the answer afterwards is that nothing was written. The server gives it half a second
there."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_storage.groups import consumer_progress


@dataclass
class Work:
    stream_id: int
    grant_id: int
    ticket: int = 0
    next_offset: int = 3
    consumed_frontier: None = None
    grant_key: GrantSecret = field(kw_only=True)

    def complete_transaction(self, *, recovered: bool) -> None:
        raise AssertionError("the answer is that it was committed")


def main(url: str, group: str, stream: str, grant: str, key: str, number: str) -> int:
    consumer_progress.BEFORE_COMMIT_S, advance = 0.5, consumer_progress.advance

    def advance_and_stop(*arguments: Any, **named: Any) -> consumer_progress.PostgresTransactionId:
        attempt = advance(*arguments, **named)
        sys.stdout.write("advanced\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.Signals[number])
        return attempt

    consumer_progress.advance = advance_and_stop
    work = Work(int(stream), int(grant), grant_key=GrantSecret(bytes.fromhex(key)))
    try:
        with ProgressTransactions(url, lambda: int(group), 60.0).begin([work]) as connection:
            connection.execute("insert into output values (1)")
    except DatabaseUnreachable as error:
        return 0 if "nothing was written" in str(error) else 1
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
