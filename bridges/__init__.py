"""From a broker to the workers, and from the ledger back to the broker. Never to Stripe."""
