"""detspec: text generation that is reproducible bit for bit, by verified speculation."""
