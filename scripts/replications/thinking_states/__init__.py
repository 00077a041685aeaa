"""Thinking States (arXiv 2602.08332) repeated at small scale: trainings, measurements and their report."""
