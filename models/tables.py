"""The tables, as SQLAlchemy knows them. The migrations are what makes them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from models.states import State

metadata: Final = MetaData()

_STATES = ", ".join(f"'{state}'" for state in State)
_UNSETTLED = "state IN ('reserved', 'sent')"


def _timestamp(name: str, *, now: bool = False) -> Column[object]:
    if now:
        return Column(
            name, DateTime(timezone=True), nullable=False, server_default=func.ledger_now()
        )
    return Column(name, DateTime(timezone=True))


billing_records: Final = Table(
    "billing_records",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("customer_id", Text, nullable=False),
    Column("billing_period", Text, nullable=False),
    Column("charge_key", Text, nullable=False),
    # The money fields are null on a tombstone only: a void before any event came.
    Column("fingerprint", Text),
    Column("amount_cents", BigInteger),
    Column("currency", Text),
    Column("stripe_customer_id", Text),
    Column("billing_run", Text),
    Column("state", Text, nullable=False),
    Column("attempt_epoch", Integer, nullable=False, server_default=text("0")),
    Column("payment_method", Text),
    Column("request_id", Text),
    Column("lease_token", Uuid),
    _timestamp("lease_expires_at"),
    _timestamp("first_sent_at"),
    _timestamp("last_sent_at"),
    _timestamp("next_attempt_at"),
    _timestamp("dispatched_at"),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("unknowns", Integer, nullable=False, server_default=text("0")),
    Column("claims", Integer, nullable=False, server_default=text("0")),
    # Times in a row that a preparation could not finish, nothing was executed, or a poll
    # found an intent still open: what the next pause grows with.
    Column("deferrals", Integer, nullable=False, server_default=text("0")),
    Column("look_up", Boolean, nullable=False, server_default=text("false")),
    Column("payment_intent_id", Text),
    Column("charge_id", Text),
    Column("error_code", Text),
    Column("decline_code", Text),
    Column("error_message", Text),
    Column("source", Text),
    Column("event", JSONB),
    _timestamp("created_at", now=True),
    _timestamp("updated_at", now=True),
    _timestamp("settled_at"),
    UniqueConstraint("customer_id", "billing_period", name="billing_records_identity"),
    UniqueConstraint("charge_key", name="billing_records_charge_key"),
    CheckConstraint(f"state IN ({_STATES})", name="billing_records_state"),
    CheckConstraint("amount_cents > 0", name="billing_records_amount"),
    CheckConstraint(
        "state = 'voided' OR (fingerprint IS NOT NULL AND amount_cents IS NOT NULL "
        "AND currency IS NOT NULL AND stripe_customer_id IS NOT NULL)",
        name="billing_records_money_fields",
    ),
    # What the sweep walks, in key order: settled rows cost it nothing.
    Index("billing_records_unsettled", "charge_key", postgresql_where=text(_UNSETTLED)),
    # What the sweep polls: intents that the customer or the bank may still end.
    Index(
        "billing_records_open_intents",
        "next_attempt_at",
        postgresql_where=text("state IN ('processing', 'requires_action')"),
    ),
    Index("billing_records_run", "billing_run", "currency", "state"),
    Index("billing_records_period_key", "billing_period", "charge_key"),
    Index("billing_records_state_key", "state", "charge_key"),
)

charge_attempts: Final = Table(
    "charge_attempts",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    # Made by the worker and equal to the lease token of the claim: after a commit whose
    # answer was lost, the row is found again by it.
    Column("token", Uuid, nullable=False),
    Column("charge_key", Text, nullable=False),
    Column("attempt_epoch", Integer, nullable=False),
    Column("idempotency_key", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("params", JSONB, nullable=False),
    Column("api_version", Text, nullable=False),
    # A keyed digest of the Stripe account key the request goes out with, never the key.
    Column("upstream_key_id", Text, nullable=False),
    _timestamp("started_at", now=True),
    _timestamp("finished_at"),
    Column("outcome", Text),
    Column("http_status", Integer),
    Column("stripe_request_id", Text),
    Column("replayed", Boolean),
    Column("error_code", Text),
    Column("payment_intent_id", Text),
    Column("charge_id", Text),
    UniqueConstraint("token", name="charge_attempts_token"),
    Index("charge_attempts_key", "charge_key", "attempt_epoch", "id"),
)

ledger_events: Final = Table(
    "ledger_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("charge_key", Text, nullable=False),
    Column("attempt_epoch", Integer, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("move", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text),
    Column("request_id", Text),
    _timestamp("at", now=True),
    Index("ledger_events_key", "charge_key", "id"),
    # A manual action is done once, however often its request arrives.
    Index(
        "ledger_events_request",
        "request_id",
        unique=True,
        postgresql_where=text("request_id IS NOT NULL"),
    ),
)

dead_letters: Final = Table(
    "dead_letters",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("source", Text, nullable=False),
    # Topic and channel, or stream and group.
    Column("place", Text, nullable=False),
    Column("delivery_id", Text, nullable=False),
    # Null once it was purged down to its hash.
    Column("body", LargeBinary),
    Column("body_sha256", Text, nullable=False),
    Column("body_size", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("charge_key", Text),
    Column("count", Integer, nullable=False, server_default=text("1")),
    _timestamp("created_at", now=True),
    _timestamp("last_seen_at", now=True),
    _timestamp("resolved_at"),
    Column("resolution", Text),
    Column("resolved_by", Text),
    UniqueConstraint("source", "place", "delivery_id", "body_sha256", name="dead_letters_delivery"),
    Index("dead_letters_open", "id", postgresql_where=text("resolved_at IS NULL")),
)

deployment: Final = Table(
    "deployment",
    metadata,
    Column("only", Boolean, primary_key=True, server_default=text("true")),
    Column("namespace", Text, nullable=False),
    Column("livemode", Boolean),
    Column("account_id", Text),
    # Set while a recovery after a database restore is under way: nobody may charge.
    _timestamp("recovering_since"),
    _timestamp("created_at", now=True),
    CheckConstraint('"only"', name="deployment_one_row"),
)


def _cents(name: str) -> Column[object]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


def _run() -> Column[object]:
    return Column("run_id", BigInteger, ForeignKey("billing_runs.id"), nullable=False)


billing_runs: Final = Table(
    "billing_runs",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("billing_run", Text, nullable=False),
    Column("currency", Text, nullable=False),
    # Null where the budget came over the vault's wire contract, which names a cap only.
    Column("expected_total_cents", BigInteger),
    Column("cap_cents", BigInteger, nullable=False),
    _cents("settled_cents"),
    _cents("held_cents"),
    Column("state", Text, nullable=False, server_default=text("'open'")),
    Column("vault_key_encrypted", Text),
    _timestamp("vault_key_expires_at"),
    _timestamp("created_at", now=True),
    _timestamp("updated_at", now=True),
    _timestamp("closed_at"),
    UniqueConstraint("billing_run", "currency", name="billing_runs_identity"),
    CheckConstraint("state IN ('open', 'closing', 'closed')", name="billing_runs_state"),
    CheckConstraint(
        "cap_cents >= 0 AND settled_cents >= 0 AND held_cents >= 0", name="billing_runs_cents"
    ),
)

billing_run_events: Final = Table(
    "billing_run_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _run(),
    Column("move", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text),
    Column("expected_total_cents", BigInteger),
    Column("cap_cents", BigInteger, nullable=False),
    _timestamp("at", now=True),
    Index("billing_run_events_run", "run_id", "id"),
)

vault_keys: Final = Table(
    "vault_keys",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _run(),
    # SHA-256 of a key of 256 random bits; the key itself is nowhere at the vault.
    Column("key_hash", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("endpoints", ARRAY(Text), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    _timestamp("revoked_at"),
    _timestamp("created_at", now=True),
    UniqueConstraint("key_hash", name="vault_keys_hash"),
    Index("vault_keys_run", "run_id"),
)

vault_holds: Final = Table(
    "vault_holds",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _run(),
    Column("idempotency_key", Text, nullable=False),
    Column("charge_key", Text, nullable=False),
    Column("attempt_epoch", Integer, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("amount_cents", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    # A success that came after the hold had been released.
    Column("late", Boolean, nullable=False, server_default=text("false")),
    Column("outcome", Text),
    Column("upstream_key_id", Text),
    Column("payment_intent_id", Text),
    Column("charge_id", Text),
    _timestamp("first_sent_at"),
    _timestamp("last_sent_at"),
    # Forwards that have begun and not ended, and when each is over even if nobody says so.
    Column("open_forwards", ARRAY(Uuid), nullable=False, server_default=text("'{}'::uuid[]")),
    Column(
        "open_untils",
        ARRAY(DateTime(timezone=True)),
        nullable=False,
        server_default=text("'{}'::timestamptz[]"),
    ),
    Column("forwards", Integer, nullable=False, server_default=text("0")),
    _timestamp("created_at", now=True),
    _timestamp("updated_at", now=True),
    UniqueConstraint("idempotency_key", name="vault_holds_idempotency_key"),
    CheckConstraint("amount_cents > 0", name="vault_holds_amount"),
    CheckConstraint(
        "state IN ('reserved', 'sent', 'settled', 'released', 'unknown')",
        name="vault_holds_state",
    ),
    Index("vault_holds_charge_key", "charge_key"),
    Index(
        "vault_holds_one_live",
        "charge_key",
        unique=True,
        postgresql_where=text("state <> 'released' AND NOT late"),
    ),
    Index(
        "vault_holds_open",
        "run_id",
        "id",
        postgresql_where=text("state IN ('reserved', 'sent', 'unknown')"),
    ),
)
