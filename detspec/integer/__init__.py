"""Integer models: tokens and log-probabilities that follow from arithmetic, whatever device computes them.

spec          the arithmetics "integer/1" and "integer8/1", in numpy alone: this is the definition
audit         texts audited by `spec`, or by `audit.c`, which is the same in C99
conformance   hashes of all operations, which a device must give

What generates is elsewhere: `ops.integer` and `ops.integer_choices` have the same functions in JAX, `model.integer` the layers,
`model.to_integer` makes such a model of one in floats.
"""
