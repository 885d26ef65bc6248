"""Models for estimates and trials: our own code, sizes from public configurations, no weights."""
