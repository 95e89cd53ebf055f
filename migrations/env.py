"""Alembic's entry: runs the scripts on the connection that `sublet_storage.bootstrap.migrate` opened.

Its search_path is the schema, so the scripts name their tables unqualified, and alembic_version is among them. The same
transaction records which releases work with the version that was reached, or fails. A developer's `alembic revision`
needs no connection and does not run this module.
"""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=None)
with context.begin_transaction():
    context.run_migrations()
    context.config.attributes["finish"]()
connection.commit()
