"""`python -m vault serve`: the same commands without Celery, for a host that has only the vault."""

from __future__ import annotations

from vault.commands import vault

vault(prog_name="vault")
