"""The vault: billing runs with their budgets, its keys, its holds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

from migrations.rows import refuse_rows

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
TABLES = ("vault_holds", "vault_keys", "billing_run_events", "billing_runs")


def _id() -> sa.Column[object]:
    return sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True)


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


def _stamp(name: str) -> sa.Column[object]:
    return sa.Column(
        name, sa.DateTime(timezone=True), nullable=False, server_default=sa.text("ledger_now()")
    )


def _cents(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))


def _run() -> sa.Column[object]:
    return sa.Column("run_id", sa.BigInteger, sa.ForeignKey("billing_runs.id"), nullable=False)


def upgrade() -> None:
    _runs()
    _keys()
    _holds()


def _runs() -> None:
    op.create_table(
        "billing_runs",
        _id(),
        sa.Column("billing_run", sa.Text, nullable=False),
        sa.Column("currency", sa.Text, nullable=False),
        sa.Column("expected_total_cents", sa.BigInteger),
        sa.Column("cap_cents", sa.BigInteger, nullable=False),
        _cents("settled_cents"),
        _cents("held_cents"),
        sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'open'")),
        sa.Column("vault_key_encrypted", sa.Text),
        _time("vault_key_expires_at"),
        _stamp("created_at"),
        _stamp("updated_at"),
        _time("closed_at"),
        sa.UniqueConstraint("billing_run", "currency", name="billing_runs_identity"),
        sa.CheckConstraint("state IN ('open', 'closing', 'closed')", name="billing_runs_state"),
        sa.CheckConstraint(
            "cap_cents >= 0 AND settled_cents >= 0 AND held_cents >= 0", name="billing_runs_cents"
        ),
        # Two writes a charge go to one row: room for its next versions on the same page.
        postgresql_with={"fillfactor": "20"},
    )
    op.create_table(
        "billing_run_events",
        _id(),
        _run(),
        sa.Column("move", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("expected_total_cents", sa.BigInteger),
        sa.Column("cap_cents", sa.BigInteger, nullable=False),
        _stamp("at"),
    )
    op.create_index("billing_run_events_run", "billing_run_events", ["run_id", "id"])


def _keys() -> None:
    op.create_table(
        "vault_keys",
        _id(),
        _run(),
        sa.Column("key_hash", sa.Text, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("endpoints", ARRAY(sa.Text), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        _time("revoked_at"),
        _stamp("created_at"),
        sa.UniqueConstraint("key_hash", name="vault_keys_hash"),
    )
    op.create_index("vault_keys_run", "vault_keys", ["run_id"])


def _holds() -> None:
    op.create_table(
        "vault_holds",
        _id(),
        _run(),
        sa.Column("idempotency_key", sa.Text, nullable=False),
        sa.Column("charge_key", sa.Text, nullable=False),
        sa.Column("attempt_epoch", sa.Integer, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("amount_cents", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("late", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("outcome", sa.Text),
        sa.Column("upstream_key_id", sa.Text),
        sa.Column("payment_intent_id", sa.Text),
        sa.Column("charge_id", sa.Text),
        _time("first_sent_at"),
        _time("last_sent_at"),
        sa.Column(
            "open_forwards", ARRAY(sa.Uuid), nullable=False, server_default=sa.text("'{}'::uuid[]")
        ),
        sa.Column(
            "open_untils",
            ARRAY(sa.DateTime(timezone=True)),
            nullable=False,
            server_default=sa.text("'{}'::timestamptz[]"),
        ),
        sa.Column("forwards", sa.Integer, nullable=False, server_default=sa.text("0")),
        _stamp("created_at"),
        _stamp("updated_at"),
        sa.UniqueConstraint("idempotency_key", name="vault_holds_idempotency_key"),
        sa.CheckConstraint("amount_cents > 0", name="vault_holds_amount"),
        sa.CheckConstraint(
            "state IN ('reserved', 'sent', 'settled', 'released', 'unknown')",
            name="vault_holds_state",
        ),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index("vault_holds_charge_key", "vault_holds", ["charge_key"])
    # One charge key has at most one live hold, whatever fails above the vault. A success that
    # came after its hold was released must still be written down, so it stands outside.
    op.create_index(
        "vault_holds_one_live",
        "vault_holds",
        ["charge_key"],
        unique=True,
        postgresql_where=sa.text("state <> 'released' AND NOT late"),
    )
    op.create_index(
        "vault_holds_open",
        "vault_holds",
        ["run_id", "id"],
        postgresql_where=sa.text("state IN ('reserved', 'sent', 'unknown')"),
    )


def downgrade() -> None:
    refuse_rows(op.get_bind(), TABLES)
    for table in TABLES:
        op.drop_table(table)
