"""Products with weights: one contract, several implementations."""
