"""The migrations make what the code believes to be there."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from models.database import REQUIRED_REVISION
from models.tables import metadata
from sandbox.binaries import CHECKOUT

SANDBOX_TABLES = {"sandbox_clock"}
"""What the embedded stack adds beside the product's own tables."""


def test_the_migrated_database_is_the_one_in_the_tables_module(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": False})
        differences = [
            difference
            for difference in compare_metadata(context, metadata)
            if not (difference[0] == "remove_table" and difference[1].name in SANDBOX_TABLES)
        ]
    assert differences == []


def test_there_is_one_head_and_the_code_asks_for_no_later_one() -> None:
    scripts = ScriptDirectory.from_config(Config(CHECKOUT / "alembic.ini"))
    (head,) = scripts.get_heads()
    assert head >= REQUIRED_REVISION
