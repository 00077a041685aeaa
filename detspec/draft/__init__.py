"""Draft sources: pairs of pure functions that propose the next tokens. A wrong draft costs speed, never correctness."""
