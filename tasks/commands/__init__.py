"""Commands of Celery's own command line. Heavy imports stay inside the functions."""
