"""A part of what `fuzz_configs.py` tries: folders with changed configs are refused, or have the logits of transformers."""

import pytest
from cases import CASES
from fuzz_configs import BAD, Folder, fuzz

SHARE = 40  # of so many changes one is tried here
# A case of each family.
CASE_OF: dict[str, str] = {family: name for name, (family, _) in reversed(CASES.items())}


@pytest.mark.parametrize("case", CASE_OF.values())
def test_changed_config_is_refused_or_means_the_same_in_transformers(case):
    assert [(what, outcome) for what, outcome in fuzz(case, SHARE) if outcome in BAD] == []


def test_control_keys_that_only_transformers_sees_give_other_logits(tmp_path, monkeypatch):
    """Were a scale of logits passed over as if it changed nothing, the outcome would say so."""
    folder = Folder("granite", tmp_path)
    assert folder.outcome(folder.config) == "the same logits"
    changed = {**folder.config, "logits_scaling": 2.0}
    assert folder.outcome(changed) == "the same logits"
    ours = next(iter(folder.ours.values()))
    monkeypatch.setattr(folder, "ours", dict.fromkeys(folder.ours, ours))
    assert folder.outcome(changed) == "others in transformers"
