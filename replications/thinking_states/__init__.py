"""The replication of Thinking States (arXiv 2602.08332) at small scale: what is trained, what is measured, and its report."""
