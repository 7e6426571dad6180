"""The spend-cap proxy in front of Stripe: the last door, and the one that money cannot pass twice.

It knows the rules in `models` and nothing of Celery, the brokers or Stripe's library.
"""
