"""Consumer groups in the database: who leads, who holds which stream, and every position.

`model.records` has the rows, the changes that a leader may write, and their results; `model.options` the options a
group is created with. `coordinator.store` is the interface, `coordinator.postgres_store` implements it, and
`tests.support.memory_store.groups` in memory for the simulator; one contract suite runs against both, and both use
`model.lending_rules` for what a change does to a row.

Every write of a leader is conditional twice: on its term (its leadership row is locked, has this term and has not
expired, by the database's clock) and, change by change, on the grant id. Whatever begins or ends a grant draws a new
grant id in the same transaction, so a report under an old grant can never move a position.

The implementation is split by topic: `sublet_storage.db.store_connection` (one connection, one transaction at a time),
`coordinator.leadership`, `coordinator.group_lifecycle` (creating, finding and deleting groups),
`coordinator.lending_statements` (the statements on lending rows), `coordinator.leader_commits` (the leader's one
write path) and `coordinator.stream_sync` (streams that were opened, and streams that ended).
"""
