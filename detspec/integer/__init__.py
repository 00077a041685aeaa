"""Integer models: tokens and log-probabilities that are the same bits on every device, by arithmetic.

spec         the arithmetic "integer/1", in numpy alone: this is the definition
arithmetic   the same functions in JAX
model        layers over pages, made of them
sampler      noise, filters and log-probabilities
convert      from a model in floats to one in integers, once, on the host
"""
