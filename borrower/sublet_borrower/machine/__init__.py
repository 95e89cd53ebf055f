"""The pure machines of a consumer: agent and borrower, without clock, sockets, threads or SQL.

`decide(event, now)` changes the machine and returns an outcome: what to send, what to report to the session, and when
to call again at the latest. `now` is in seconds of a monotonic clock. `transitions` has the statuses and the action for
each event; the diagrams of `docs/protocol.md` are drawn from it.
"""
