"""A simulator of the part of Stripe's API that charging needs. It is not Stripe: no money moves.

It keeps Stripe's rules for idempotency keys, consistent lists and validation, has a commit point
that is separate from the reply, and can be told to fail before or after it. `core.Simulator` works
in process; `python -m sandbox.stripe_simulator` serves it over HTTP.
"""
