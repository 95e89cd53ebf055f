"""The truth, in Postgres: messages, streams, groups and nodes, and every statement of SQL. See README.md.

Nothing in another package's memory counts until it has been written here, and every write names the authority it is
made under (a term, a grant id) and is refused once that authority has passed on. All times are the database's clock's,
so that no two machines need to agree on one.
"""
