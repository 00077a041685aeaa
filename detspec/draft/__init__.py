"""Guesses of the next tokens. A bad guess costs speed, never correctness.

A draft source is a function `draft_fn(params, cfg, state) -> Draft`. It writes only cache slots that verification rewrites.
"""
