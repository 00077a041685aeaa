"""Products of rows with the weights of experts: one contract, several implementations."""
