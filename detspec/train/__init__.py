"""Training small models from nothing: one loop that resumes bit for bit, and the kinds of runs it is given."""
