"""Ablations: one file a question, each with its answer in the docstring; all write the same kind of table."""
