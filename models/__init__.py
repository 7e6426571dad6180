"""The rules and the ledger. Nothing in this room knows Celery, Stripe, NSQ, Redis or Tornado."""
