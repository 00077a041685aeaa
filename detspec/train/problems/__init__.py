"""Problems to train models that think on: a question, the steps to its answer, and where in the question each step follows."""
