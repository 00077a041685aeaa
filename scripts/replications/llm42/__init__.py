"""LLM-42 (arXiv 2601.17768) repeated at small scale, in ratios: measurements, predictions and their report."""
