"""Reading and writing weights: Hugging Face folders, orbax checkpoints, tokenizers."""
