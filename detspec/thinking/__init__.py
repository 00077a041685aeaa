"""Thinking States: reasoning in states that are made chunk by chunk while the input is read (arXiv 2602.08332)."""
