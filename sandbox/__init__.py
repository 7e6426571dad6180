"""The embedded stack: real PostgreSQL, Redis, nsqd, Celery and both bridges on 127.0.0.1.

Only Stripe is simulated. `make up`, `make demo`, the tests and the bench run on it; nothing of
the product imports it.
"""
