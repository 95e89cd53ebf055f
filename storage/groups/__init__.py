"""What is true about groups: who leads, who holds which stream, how far each has come.

`model` has the words: rows, the entries a leader may write, the answers it gets. `store` is the interface, `postgres` the
truth, `memory` its twin for the simulator; one contract suite runs against both.

Every write of a leader is conditional twice: on its term (its leadership row is locked, bears this term and has not
expired, by the database's clock) and, entry by entry, on the grant id. Whatever begins or ends a grant increments the
grant id in the same statement, so a word spoken under an old grant can never move a position.
"""
