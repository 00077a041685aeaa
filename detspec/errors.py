"""The one exception for input a user can mend: its message says what was given, what is accepted and what to do."""

MAX_MESSAGE = 2000  # characters


class InputError(ValueError):
    """Bad input: a file, a config value, a request. The command line prints its message as one line and exits with 2.

    A message quotes what was given, which may have any size: of a long one only the beginning and the end are kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MAX_MESSAGE))


class DivergenceError(RuntimeError):
    """Processes that share a mesh decided differently, or chips hold other copies of one array: all processes must end.

    The message has the last decisions of both sides, or names the chips. The same commands resume.
    """


def shortened(text: str, most: int) -> str:
    """`text`, without its middle if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
