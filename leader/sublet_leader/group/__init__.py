"""One group's leader: a pure machine.

Events come in (a borrower's message, the answer to a write, time), an outcome goes out (entries to write, messages to
send, when to come back). A message that rests on a write is only sent when the write's answer has come in as an event.

`table` has the assignment's statuses and transitions, `stream_table` the streams and what is being written for them,
`members` the borrowers, `machine` the door through which every event comes.
"""
