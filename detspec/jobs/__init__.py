"""Batch jobs: prompts in, completions out, and a journal between them that survives anything."""
