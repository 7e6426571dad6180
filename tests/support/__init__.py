"""What the tests share: real services, a simulated Stripe, roles to start and to kill."""
