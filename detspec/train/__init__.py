"""Training small models from scratch: one loop that resumes bit for bit, and the kinds of runs it takes."""
