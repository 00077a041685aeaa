"""Whether determinism can be promised on the device at hand."""
