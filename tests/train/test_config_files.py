"""Config files: what they must hold, and how one of several runs is named."""

from pathlib import Path

import pytest

from detspec.cli.commands import main
from detspec.errors import InputError
from detspec.model.dense import config_to_json
from detspec.model.params import num_params
from detspec.rl.config import RLConfig
from detspec.train import run
from detspec.train.experiment import Result, load_config, settings_of, split_source
from detspec.train.language import LanguageConfig
from detspec.train.problems.tasks import tokenizer_of

CONFIGS = Path(__file__).parents[2] / "configs"
# Each file, with an arm where it has several, and the most bytes of float32 weights that its model takes.
RUNS = {"tiny_python.py": 24e6, "thinking_parity.py": 3e6, "thinking_parity.py:cot": 3e6, "thinking_parity.py:no_cot": 3e6}
RUNS |= {"rl_parity.py:taught": 3e6}
ON_POLICY = ("rl_def.py", "rl_parity.py")  # they start from a folder
KIND = """
import dataclasses
from detspec.errors import InputError
from detspec.model.params import num_params

@dataclasses.dataclass(frozen=True)
class Config:
    arm: str

    def experiment(self, workdir):
        raise AssertionError("loading makes no experiment")

"""
PLAIN = "def get_config():\n    return Config('none')\n"
OPTIONAL = "def get_config(arm='usual'):\n    return Config(arm)\n"
REQUIRED = (
    "def get_config(arm):\n    if arm != 'a':\n        raise InputError(f'arm {arm!r}: choose a')\n    return Config(arm)\n"
)


def write(folder: Path, source: str) -> str:
    (folder / "config.py").write_text(KIND + source)
    return str(folder / "config.py")


@pytest.mark.parametrize(
    ("source", "suffix", "arm"), [(PLAIN, "", "none"), (OPTIONAL, "", "usual"), (OPTIONAL, ":b", "b"), (REQUIRED, ":a", "a")]
)
def test_get_config_gets_the_arm_if_there_is_one(tmp_path: Path, source: str, suffix: str, arm: str):
    assert load_config(write(tmp_path, source) + suffix).arm == arm


@pytest.mark.parametrize(
    ("source", "suffix", "message"),
    [
        (PLAIN, ":a", r"its get_config takes no arm, got 'a'; give .*config\.py alone"),
        (REQUIRED, "", r"its get_config needs an arm; give .*config\.py:ARM"),
        (REQUIRED, ":b", "arm 'b': choose a"),
        (PLAIN, ":", r"config\.py:' must be FILE or FILE:ARM"),
        ("x = 1\n", "", "defines no get_config"),
        ("def get_config():\n    return 3\n", "", "must return the config of a run, such as LanguageConfig; got int"),
    ],
)
def test_bad_config_file_or_arm_is_refused(tmp_path: Path, source: str, suffix: str, message: str):
    with pytest.raises(InputError, match=message):
        load_config(write(tmp_path, source) + suffix)


def test_error_inside_get_config_is_not_taken_for_a_missing_arm(tmp_path: Path):
    with pytest.raises(TypeError, match="unexpected keyword"):
        load_config(write(tmp_path, "def get_config():\n    return Config(nonsense=1)\n"))


@pytest.mark.parametrize("suffix", ["", ":a"])
def test_missing_config_file_is_named(tmp_path: Path, suffix: str):
    with pytest.raises(InputError, match=r"config\.py: no such config file"):
        load_config(f"{tmp_path / 'config.py'}{suffix}")


def test_arm_follows_the_last_colon():
    assert split_source("a:b/c.py:d") == (Path("a:b/c.py"), "d")
    assert split_source(Path("a/c.py")) == (Path("a/c.py"), None)
    with pytest.raises(InputError, match="must be FILE or FILE:ARM"):
        split_source(":arm")


@pytest.mark.parametrize(("suffix", "workdir"), [("", "runs/config"), (":deep", "runs/config-deep")])
def test_command_names_the_work_folder_after_file_and_arm(monkeypatch, capsys, suffix: str, workdir: str):
    def train(config, *, workdir, resume, chips):
        assert chips == 1
        assert config == f"some/config.py{suffix}"
        return Result({"accuracy": 0.25, "tokens": 1234}, workdir / "export")

    monkeypatch.setattr(run, "train", train)
    assert main(["train", "--config", f"some/config.py{suffix}"]) == 0
    assert capsys.readouterr().out == f"accuracy: 0.2500\ntokens: 1,234\nmodel: {workdir}/export\n"


@pytest.mark.parametrize(("source", "most_bytes"), RUNS.items())
def test_config_of_the_repository_loads_and_opens_with_a_lab_note(source: str, most_bytes: float, tmp_path: Path):
    config = load_config(CONFIGS / source)
    cfg = config.model if isinstance(config, LanguageConfig) else config.model(tokenizer_of(config.task))
    assert 4 * num_params(cfg) <= most_bytes
    assert split_source(CONFIGS / source)[0].read_text().startswith('"""')


@pytest.mark.parametrize("source", ON_POLICY)
def test_config_of_rewards_loads_draws_prompts_and_opens_with_a_lab_note(source: str):
    config = load_config(CONFIGS / source)
    assert isinstance(config, RLConfig)
    prompts, known = config.draw(0)
    assert len(prompts) == len(known) == config.prompts
    assert (prompts, known) == config.draw(0) != config.draw(1)
    assert (CONFIGS / source).read_text().startswith('"""')


def test_record_of_a_run_keeps_the_shape_of_a_model_as_checkpoints_do():
    """Runs that were recorded by these flat fields, before models had kinds of layers, resume."""
    config = load_config(CONFIGS / "tiny_python.py")
    assert isinstance(config, LanguageConfig)
    model = settings_of(config)["model"]
    assert model == config_to_json(config.model)
    assert {"num_layers", "num_heads", "d_ff", "rope_theta"} <= model.keys()
    assert "kinds" not in model


def test_every_config_of_the_repository_is_tried():
    assert {source.split(":")[0] for source in (*RUNS, *ON_POLICY)} == {path.name for path in CONFIGS.glob("*.py")}
