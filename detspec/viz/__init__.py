"""Pictures of what the engine did, drawn from plain data."""
