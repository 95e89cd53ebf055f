"""Holes in order, exactly once and retention, closed where Postgres is what closes them.

Each file `0003_NAME.sql` closes one; `0003_NAME.down.sql` beside it takes that back.
"""

from pathlib import Path

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
compatible_from = "0002"

SQL = Path(__file__).parent.parent / "sql"


def upgrade() -> None:
    for path in sorted(SQL.glob("0003_*.sql")):
        if not path.name.endswith(".down.sql"):
            _run(path)


def downgrade() -> None:
    for path in sorted(SQL.glob("0003_*.down.sql"), reverse=True):
        _run(path)


def _run(path: Path) -> None:
    """Straight to psycopg: many statements, and percent signs that are no placeholders."""
    op.get_bind().connection.driver_connection.execute(path.read_text(encoding="utf-8"))
