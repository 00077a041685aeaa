"""Numbers that the paper gives (Amos et al., arXiv 2602.08332), accuracies in %, with Qwen2.5 of 0.5B and 1.5B."""

LENGTHS = (10, 20, 40)  # up to so many operations in training; tested on up to 100
# Table 1, mean accuracy over longer problems, by training length.
STATE_TRACKING = {
    "parity": {"no_cot": (54.67, 57.50, 59.60), "cot": (12.35, 38.12, 64.38), "thinking": (98.37, 99.02, 100.0)},
    "variables": {"no_cot": (2.15, 2.17, 2.19), "cot": (6.78, 35.45, 87.75), "thinking": (33.76, 87.23, 97.71)},
}
# Table 2, accuracy and speed-up over the chain of thought: GSM, two hops with facts in training, two hops with facts known.
REASONING = {
    "arithmetic": {
        "cot": (60.50, 1.0),
        "no_cot": (34.11, 5.59),
        "thinking": (42.22, 2.66),
        "coconut": (32.65, 3.14),
        "icot": (34.00, 5.71),
    },
    "two_hop": {
        "cot": (54.79, 1.0),
        "no_cot": (33.47, 1.89),
        "thinking": (54.91, 1.19),
        "coconut": (33.71, 1.14),
        "icot": (28.84, 1.59),
    },
    "known": {
        "cot": (43.07, 1.0),
        "no_cot": (31.92, 2.03),
        "thinking": (43.05, 1.23),
        "coconut": (32.60, 1.21),
        "icot": (36.31, 1.80),
    },
}
LATENTS = (6, 21)  # Table 3 raises the number of Coconut's latents from 6 to 21
LAYERS = {4: 22, 8: 27, 12: 30, 16: 34, 20: 37, 24: 39, 26: 42.2}  # figure 3a, GSM by layers in the loop
CHUNKS = {2: 35, 4: 41.5, 8: 42.2, 16: 39, 32: 37.5, 48: 37.5}  # figure 3b, GSM by tokens of a chunk
QUESTION = {"last": 42.22, "first": 48.65}  # GSM, with the question where it stands, and in front
