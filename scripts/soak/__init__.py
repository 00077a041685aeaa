"""The long soak: a million tokens over every axis that must not matter, and a thousand kills."""
