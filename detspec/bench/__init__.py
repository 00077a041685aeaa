"""How fast: ordinary against deterministic generation, and what bounds both."""
