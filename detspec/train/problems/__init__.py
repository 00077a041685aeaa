"""Problems to train reasoning models on: a question, the steps to its answer, and where each step can be inferred."""
