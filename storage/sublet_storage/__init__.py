"""Everything in Postgres: messages, streams, groups and nodes, and every statement of SQL.

Nothing in another package's memory counts until it has been written here, and every write names the authority it is
made under (a term, a grant id) and is rejected once that authority has ended. All times are those of the database's
clock, so that no two machines need to agree on one. See README.md.
"""
