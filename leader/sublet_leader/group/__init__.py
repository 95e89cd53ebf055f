"""The leader of one group: a pure machine that grants, revokes and takes progress.

Events come in (a borrower's message, the answer to a write, time), an outcome goes out (changes to write, messages to
send, when to call again). A message that depends on a write is only sent when the write's answer has come as an event.

`machine` takes every event; `grant_transitions` has the table that `assignment_manager` applies, `grant_actions` its
actions; `stream_table` has the streams and their pending writes, `members` the borrowers; `rebalancer` calls the
allocation strategy.
"""
