"""The parts of the job that `compare_bits.py` runs: they touch the package as a user does, and run on commits of any shape."""
