"""Tests of pure functions: no services, no clock, no network."""
