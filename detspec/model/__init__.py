"""A family of decoders as pure functions over pytrees."""
