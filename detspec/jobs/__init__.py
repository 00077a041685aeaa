"""Batch jobs: prompts in, completions out, and a journal that lets a killed job resume."""
