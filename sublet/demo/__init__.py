"""`sublet demo`: Spark tasks share messages while a task and the leader are killed.

`flights` has the data, `application` is the Spark application (a process of its own), `task_work` is the tasks' work on
a batch, `runner` starts everything and kills some of it (`child_processes` ends it, whatever happens; `group_monitor`
reads the group, `takeover_reporter` prints what a kill led to), `delivery_check` compares the tasks' records with the
source and with the history of lendings, `display` prints. The checker shares nothing with the consumers but their
records.
"""

from __future__ import annotations


def main(as_json: bool = False, keep: str | None = None) -> int:
    """Run the demo; return the exit code: 1 if anything was lost, or repeated without an explanation, or if a kill was
    not in the middle of the work. `keep`: a directory for the records, kept afterwards."""
    from sublet.demo.runner import run_demo

    return run_demo(as_json, keep)
