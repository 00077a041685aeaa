"""The demonstration: other batches change ordinary generation, but not deterministic generation."""
