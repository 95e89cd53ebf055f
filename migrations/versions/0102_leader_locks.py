"""Adds the advisory locks of leaders, by which others detect their end before their leases expire."""

from alembic import op

revision = "0102"
down_revision = "0101"
branch_labels = None
depends_on = None

compatible_from = "0101"
"""A leader of the release before leaves another's key in the row that it claims: a key counts only with its own
incarnation."""


def upgrade() -> None:
    op.execute("alter table leadership add column lock_key integer")
    op.execute(
        "comment on column leadership.lock_key is "
        "'of the advisory lock that the leader holds as long as its process lives; null: its lease alone decides'"
    )


def downgrade() -> None:
    op.execute("alter table leadership drop column lock_key")
