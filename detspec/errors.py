"""The exception for input a user can mend: its message says what was given, what is accepted and what to do."""

MAX_MESSAGE = 2000  # characters


class InputError(ValueError):
    """Bad input: a file, a config value, a request. The command line prints its message as one line and exits with 2.

    A message quotes what was given, which may have any size: of a long one only the beginning and the end are kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MAX_MESSAGE))


class ParameterError(InputError):
    """A sampling parameter that is refused.

    Attributes:
        name: the parameter.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"sampling parameter {name} {why}")
        self.name = name


class DivergenceError(RuntimeError):
    """Processes that share a mesh decided differently, or chips hold other copies of one array: all processes must end.

    The message has the last decisions of both sides, or names the chips. The same commands resume.
    """


def shown(value: object) -> str:
    """`value` as errors quote it. Not all can be: Python writes no integer of more than 4300 digits."""
    try:
        return repr(value)
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be shown"


def shortened(text: str, most: int) -> str:
    """`text`, without its middle if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
