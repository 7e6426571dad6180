"""The ledger: records, attempts, audit, dead letters, deployment, and its clock."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from migrations.rows import refuse_rows

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATES = (
    "'reserved', 'sent', 'charged', 'processing', 'card_declined', 'requires_action', "
    "'rejected', 'blocked', 'voided', 'review'"
)
TABLES = ("deployment", "dead_letters", "ledger_events", "charge_attempts", "billing_records")


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


def _stamp(name: str) -> sa.Column[object]:
    return sa.Column(
        name, sa.DateTime(timezone=True), nullable=False, server_default=sa.text("ledger_now()")
    )


def _count(name: str, start: int = 0) -> sa.Column[object]:
    return sa.Column(name, sa.Integer, nullable=False, server_default=sa.text(str(start)))


def _id() -> sa.Column[object]:
    return sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True)


def upgrade() -> None:
    # All time in the ledger is this function, so that a clock can be moved in one place.
    op.execute(
        "CREATE FUNCTION ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE "
        "AS 'SELECT clock_timestamp()'"
    )
    _records()
    _attempts_and_audit()
    _dead_letters()
    op.create_table(
        "deployment",
        sa.Column("only", sa.Boolean, primary_key=True, server_default=sa.text("true")),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("livemode", sa.Boolean),
        sa.Column("account_id", sa.Text),
        _time("recovering_since"),
        _stamp("created_at"),
        sa.CheckConstraint('"only"', name="deployment_one_row"),
    )


def _records() -> None:
    op.create_table(
        "billing_records",
        _id(),
        sa.Column("customer_id", sa.Text, nullable=False),
        sa.Column("billing_period", sa.Text, nullable=False),
        sa.Column("charge_key", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text),
        sa.Column("amount_cents", sa.BigInteger),
        sa.Column("currency", sa.Text),
        sa.Column("stripe_customer_id", sa.Text),
        sa.Column("billing_run", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        _count("attempt_epoch"),
        sa.Column("payment_method", sa.Text),
        sa.Column("request_id", sa.Text),
        sa.Column("lease_token", sa.Uuid),
        _time("lease_expires_at"),
        _time("first_sent_at"),
        _time("last_sent_at"),
        _time("next_attempt_at"),
        _time("dispatched_at"),
        _count("attempts"),
        _count("unknowns"),
        _count("claims"),
        _count("deferrals"),
        sa.Column("look_up", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("payment_intent_id", sa.Text),
        sa.Column("charge_id", sa.Text),
        sa.Column("error_code", sa.Text),
        sa.Column("decline_code", sa.Text),
        sa.Column("error_message", sa.Text),
        sa.Column("source", sa.Text),
        sa.Column("event", JSONB),
        _stamp("created_at"),
        _stamp("updated_at"),
        _time("settled_at"),
        sa.UniqueConstraint("customer_id", "billing_period", name="billing_records_identity"),
        sa.UniqueConstraint("charge_key", name="billing_records_charge_key"),
        sa.CheckConstraint(f"state IN ({STATES})", name="billing_records_state"),
        sa.CheckConstraint("amount_cents > 0", name="billing_records_amount"),
        sa.CheckConstraint(
            "state = 'voided' OR (fingerprint IS NOT NULL AND amount_cents IS NOT NULL "
            "AND currency IS NOT NULL AND stripe_customer_id IS NOT NULL)",
            name="billing_records_money_fields",
        ),
    )
    op.create_index(
        "billing_records_unsettled",
        "billing_records",
        ["charge_key"],
        postgresql_where=sa.text("state IN ('reserved', 'sent')"),
    )
    op.create_index("billing_records_run", "billing_records", ["billing_run", "currency", "state"])
    op.create_index(
        "billing_records_open_intents",
        "billing_records",
        ["next_attempt_at"],
        postgresql_where=sa.text("state IN ('processing', 'requires_action')"),
    )
    op.create_index(
        "billing_records_period_key", "billing_records", ["billing_period", "charge_key"]
    )
    op.create_index("billing_records_state_key", "billing_records", ["state", "charge_key"])


def _attempts_and_audit() -> None:
    op.create_table(
        "charge_attempts",
        _id(),
        sa.Column("token", sa.Uuid, nullable=False),
        sa.Column("charge_key", sa.Text, nullable=False),
        sa.Column("attempt_epoch", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("params", JSONB, nullable=False),
        sa.Column("api_version", sa.Text, nullable=False),
        sa.Column("upstream_key_id", sa.Text, nullable=False),
        _stamp("started_at"),
        _time("finished_at"),
        sa.Column("outcome", sa.Text),
        sa.Column("http_status", sa.Integer),
        sa.Column("stripe_request_id", sa.Text),
        sa.Column("replayed", sa.Boolean),
        sa.Column("error_code", sa.Text),
        sa.Column("payment_intent_id", sa.Text),
        sa.Column("charge_id", sa.Text),
        sa.UniqueConstraint("token", name="charge_attempts_token"),
    )
    op.create_index("charge_attempts_key", "charge_attempts", ["charge_key", "attempt_epoch", "id"])
    op.create_table(
        "ledger_events",
        _id(),
        sa.Column("charge_key", sa.Text, nullable=False),
        sa.Column("attempt_epoch", sa.Integer, nullable=False),
        sa.Column("from_state", sa.Text),
        sa.Column("to_state", sa.Text, nullable=False),
        sa.Column("move", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("request_id", sa.Text),
        _stamp("at"),
    )
    op.create_index("ledger_events_key", "ledger_events", ["charge_key", "id"])
    op.create_index(
        "ledger_events_request",
        "ledger_events",
        ["request_id"],
        unique=True,
        postgresql_where=sa.text("request_id IS NOT NULL"),
    )


def _dead_letters() -> None:
    op.create_table(
        "dead_letters",
        _id(),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("delivery_id", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("body_sha256", sa.Text, nullable=False),
        sa.Column("body_size", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("charge_key", sa.Text),
        _count("count", 1),
        _stamp("created_at"),
        _stamp("last_seen_at"),
        _time("resolved_at"),
        sa.Column("resolution", sa.Text),
        sa.Column("resolved_by", sa.Text),
        sa.UniqueConstraint(
            "source", "place", "delivery_id", "body_sha256", name="dead_letters_delivery"
        ),
    )
    op.create_index(
        "dead_letters_open",
        "dead_letters",
        ["id"],
        postgresql_where=sa.text("resolved_at IS NULL"),
    )


def downgrade() -> None:
    refuse_rows(op.get_bind(), TABLES)
    for table in TABLES:
        op.drop_table(table)
    op.execute("DROP FUNCTION ledger_now()")
