"""Alembic's entry: run the scripts on the connection that `sublet_storage.bootstrap.migrate` opened.

Its search_path is the schema, so the scripts name their tables bare, and alembic_version lives among them. In the same
transaction it is marked which programs work with the version that was reached, or it is refused. A
developer's `alembic revision` needs no connection and does not come here.
"""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=None)
with context.begin_transaction():
    context.run_migrations()
    context.config.attributes["finish"]()
connection.commit()
