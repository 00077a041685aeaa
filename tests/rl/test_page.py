"""The code of docs/on_policy.md: it runs, and no log-probability of its trainer has other bits than the sampler's."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "on_policy.md"


@pytest.mark.slow
@pytest.mark.optimised
def test_code_of_the_page_runs_and_its_ratio_is_one_in_every_step(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    *steps, digest = capsys.readouterr().out.splitlines()
    assert len(digest) == 64
    assert len(steps) == 4
    for number, line in enumerate(steps):
        step, _, differ, smallest, largest = map(float, line.split())
        assert (step, differ, smallest, largest) == (number, 0, 1, 1)
