"""OpenAI's request and response bodies: pure mappings to and from what engines take and give, for batch files and servers."""
