"""The leader of one group: a pure machine that grants, revokes and takes progress.

Events come in (a borrower's message, the answer to a write, time), an outcome goes out (changes to write, messages to
send, when to call again). A message that rests on a write is only sent when the write's answer has come as an event.

`machine` takes every event, `table` has the assignment's statuses and transitions, `stream_table` the streams and what
is being written for them, `members` the borrowers.
"""
