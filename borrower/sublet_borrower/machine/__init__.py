"""The pure part of a consumer: borrower and agent, without clock, sockets, threads or SQL.

`decide(event, now)` changes the machine and answers an outcome: what to send, what to tell the session, and when to
come back at the latest. `now` is seconds on a monotonic clock. `table` has the statuses and who answers what;
`docs/protocol.md` draws its diagrams from it.
"""
