"""The oldest schema that this version migrates. It has no steps: env.py makes an empty database's tables itself.

Revision ID: 0009
Revises:
"""

revision = "0009"
down_revision = None


def upgrade() -> None:
    """A database below this revision is refused, an empty one is made at the newest."""
