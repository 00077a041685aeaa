"""Jobs over files of requests and completions."""
