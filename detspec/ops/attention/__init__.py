"""Attention of query windows over a paged cache: one contract, several implementations."""
