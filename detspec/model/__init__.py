"""One decoder family as pure functions over pytrees."""
