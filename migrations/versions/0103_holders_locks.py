"""Adds to lending rows whether their holders' advisory locks were held, by which the next leader detects their end."""

from alembic import op

revision = "0103"
down_revision = "0102"
branch_labels = None
depends_on = None

compatible_from = "0101"
"""A leader of a release before leaves what was written of another borrower in the row that it grants: it counts only
with that borrower's own id."""


def upgrade() -> None:
    op.execute("alter table lending add column lock_borrower_id text, add column lock_valid_s double precision")
    op.execute(
        "comment on column lending.lock_borrower_id is "
        "'the borrower of whose agent the advisory lock was held when the row was granted to it, or reclaimed by it'"
    )
    op.execute(
        "comment on column lending.lock_valid_s is "
        "'for how long that agent begins user calls after it last saw its lock held'"
    )


def downgrade() -> None:
    op.execute("alter table lending drop column lock_borrower_id, drop column lock_valid_s")
