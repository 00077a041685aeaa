"""The one exception for input a user can mend: its message says what was given, what is accepted and what to do."""


class InputError(ValueError):
    """Bad input: a file, a config value, a request. The command line prints its message as one line and exits with 2."""
