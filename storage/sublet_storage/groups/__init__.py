"""Consumer groups in the database: who leads, who holds which stream, and every position.

`model.records` has the words: rows, the entries a leader may write, the answers it gets; `model.options` what a group
is created with. `coordinator.store` is the interface, `coordinator.postgres` the truth,
`tests.support.memory_store.groups` its twin for the simulator; one contract suite runs against both, and both ask
`model.grants` what a change does to a row.

Every write of a leader is conditional twice: on its term (its leadership row is locked, has this term and has not
expired, by the database's clock) and, change by change, on the grant id. Whatever begins or ends a grant draws a new
grant id in the same transaction, so a report under an old grant can never move a position.

The implementation is cut by topic: `sublet_storage.db.store_connection` (one connection, one transaction at a time),
`coordinator.leadership`, `coordinator.lifecycle` (creating, finding and deleting groups), `coordinator.lending_rows`
(the statements on lending rows), `coordinator.commits` (the leader's one write path) and `coordinator.stream_sync`
(streams that came, and streams that ended).
"""
