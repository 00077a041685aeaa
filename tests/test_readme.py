"""The first code of `README.md` holds as it is written, and fails where the request is an ordinary one."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.optimised  # as users compile it


def first_code() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_first_code_holds():
    assert "assert " in first_code()
    exec(first_code(), {})


def test_control_ordinary_request_fails_the_same_assert():
    ordinary = first_code().replace("seed=7)", "seed=7, deterministic=False)")
    assert ordinary != first_code()
    with pytest.raises(AssertionError):
        exec(ordinary, {})
