"""Draft, verify, commit: the loop that generates, with its cache carried linearly."""
