"""Replicas side by side give the bits of one, wherever a request runs."""

import dataclasses
import json

import jax
import pytest

from detspec.cli.commands import main
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from tests.mesh.conftest import model_on
from tests.mesh.shapes import CFG, engine_on, facts, schedule_for

SHAPE = {"max_requests": 2, "max_len": 80, "schedule": schedule_for(CFG), "method": "none", "compile_cache": False}


def test_two_replicas_on_two_chips_each_have_the_bits_of_one_chip_and_both_work():
    prompts = [[3 + number, 5, 7 * number] for number in range(5)]
    sampling = [SamplingParams(max_tokens=12, temperature=t, seed=7, ignore_eos=True) for t in (0, 1, 0.5, 1.5, 0)]
    sampling[1] = dataclasses.replace(sampling[1], n=2)
    engine = Engine(model_on(CFG, 2), EngineConfig(**SHAPE), num_replicas=2)
    found = engine.generate(prompts, sampling)
    alone = engine_on(model_on(CFG, 1), max_requests=2).generate(prompts, sampling)
    assert [facts(one) for one in found] == [facts(one) for one in alone]
    places = [{str(d) for leaf in jax.tree.leaves(each.device.state) for d in leaf.devices()} for each in engine.replicas]
    assert len(places[0]) == len(places[1]) == 2
    assert not places[0] & places[1]
    assert all(replica.num_tokens > 0 for replica in engine.replicas)
    assert not engine.has_work


def test_new_weights_reach_all_replicas():
    engine = Engine(model_on(CFG, 1), EngineConfig(**SHAPE), num_replicas=2)
    asked = [[5, 6], [5, 6]], SamplingParams(max_tokens=9, ignore_eos=True)
    before = [facts(one) for one in engine.generate(*asked)]
    engine.update_params(jax.tree.map(lambda leaf: leaf * 2, engine.model.params))
    after = [facts(one) for one in engine.generate(*asked)]
    assert before[0] == before[1] != after[0] == after[1]
    assert all(replica.num_tokens == 18 for replica in engine.replicas)


def test_job_with_two_engines_writes_the_bytes_of_one(tmp_path):
    lines = [json.dumps({"id": str(i), "prompt": f"def f{i}(", "sampling": {"seed": i}}) for i in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    asked = ["--prompts", str(tmp_path / "in.jsonl"), "--max-tokens", "8", "--temperature", "1", "--method", "none"]
    for number in (1, 2):
        out = str(tmp_path / f"{number}.jsonl")
        assert main(["generate", *asked, "--max-requests", "1", "--max-len", "64", "--engines", str(number), "--out", out]) == 0
    assert (tmp_path / "2.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("num_chips", "num_replicas", "message"),
    [(1, 9, "9 chips were asked for, but jax has 8 cpu devices"), (4, 3, "12 chips"), (1, 0, "positive integer, got 0")],
)
def test_replicas_without_devices_are_refused(num_chips, num_replicas, message):
    with pytest.raises(InputError, match=message):
        Engine(model_on(CFG, num_chips), EngineConfig(**SHAPE), num_replicas=num_replicas)
