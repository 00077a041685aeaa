"""Measures servers with OpenAI's interface, ours among them."""
