"""What is true: Postgres, and nothing else knows SQL.

Whatever must survive is here, in one schema of one database: the messages, which streams there are, how far each
group has come, who leads and who holds what. Nothing in another package's memory counts until it has been written
here, and every write names the authority it is made under (a term, a grant id) and is refused once that authority has
passed on.

**The database** itself: `connect` opens connections and says what is wrong when it cannot; `database` chooses between
the database that was given and a server of our own, which `embedded` makes, starts and stops; `migrate` brings the
schema to this program's version. All times are the database's clock's, so that no two machines need to agree on one.

**Messages**: a message belongs by its topic to a space and by its key to one of the space's streams (`routing`). A
stream is an ordered sequence with offsets from 0; it is stored as blocks of up to some thousands of messages
(`block`), appended and read by `log`. The streams of a space open and close together, as generations (`spaces`,
`turnover`). Payloads of old blocks may lie elsewhere (`payloads`). What is published by SQL, in a transaction of
somebody else, gets there by way of the `outbox`.

**Groups** (`groups/`): leadership, lendings, their history. **Nodes** (`nodes`): which leader processes can be
reached.

Everything but `migrate` is psycopg: the statements here are few, they run often, and each is written to be one round
trip that is right whatever runs beside it. The package imports `protocol.words` and `protocol.errors` and nothing
else of ours.
"""
