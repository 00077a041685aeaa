"""A server of OpenAI's HTTP interface, whose equal requests get equal answers."""
