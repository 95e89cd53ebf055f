"""Recorded histories: real processes run under kills, and a checker reads what each recorded.

The checker knows nothing but the guarantees (`docs/guarantees.md`). `plan` draws from one seed what happens when.
`stage` starts a real Postgres, real leader nodes (`sublet leader`), and the processes `publishing`, `consuming` and
`operating`, carries the plan out on them, lets the groups consume what is left, and collects the log, the tables and
the history of lendings. `history` writes and reads the files of a process, `checks` verifies them, `anomaly_report`
shows what led to an anomaly. `python -m tests.recorded` runs it.
"""
