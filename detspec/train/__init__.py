"""Training a small model from nothing: corpus, tokenizer, steps that resume bit for bit."""
