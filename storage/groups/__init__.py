"""What is true about groups: who leads, who holds which stream, how far each has come.

`model` has the words: rows, the entries a leader may write, the answers it gets; `options` what a group is created
with. `store` is the interface, `postgres` the truth, `memory` its twin for the simulator; one contract suite runs
against both, and both ask `rules` what an entry does to a row.

Every write of a leader is conditional twice: on its term (its leadership row is locked, bears this term and has not
expired, by the database's clock) and, entry by entry, on the grant id. Whatever begins or ends a grant draws a new
grant id in the same transaction, so a word spoken under an old grant can never move a position.

The truth is cut by topic: `channel` (one connection, one transaction at a time), `leadership`, `births` (creating,
finding and deleting groups), `rows` (the statements on lending rows), `commits` (the leader's one write path) and
`renewal` (streams that came, and streams that ended).
"""
