"""Windows and thoughts of real runs: recorded, and drawn."""
