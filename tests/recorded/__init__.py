"""Recorded histories: real processes publish, consume and are killed, each writes down what it did and saw, and a
checker that knows the promises alone (`docs/guarantees.md`) reads it all together.

`plan` draws from one seed what happens when. `stage` starts a real Postgres, real leader nodes (`sublet leader`), and
the processes `publishing`, `consuming` and `operating`, carries the plan out on them, lets the groups consume what is
left, and collects the log, the tables and the history of lendings. `record` is how a process writes down what it does,
`history` what is read from these files, `checks` what must be true of it. `python -m tests.recorded` runs it.
"""
