"""Job files for clusters: their syntax, and that the commands in them are commands of ours."""

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from detspec.cli.commands import make_parser

SCRIPTS = Path(__file__).parents[1] / "scripts"


def parse_command(text: str, variables: dict[str, str]) -> argparse.Namespace:
    """The arguments of the `exec detspec ...` in a shell text."""
    command = text[text.index("exec detspec ") :].replace("\\\n", " ").splitlines()[0]
    for name, value in variables.items():
        command = command.replace(f"${{{name}}}", value)
    return make_parser().parse_args(shlex.split(command, comments=True)[2:])


def test_slurm_file_is_bash_and_runs_one_shard_a_task():
    path = SCRIPTS / "slurm_array.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, check=True).stderr == b""
    text = path.read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    assert {"--requeue", "--signal=B:TERM@60", "--array=0-3"} <= set(options)
    args = parse_command(text, {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"})
    assert args.shard == (2, 4)


def test_kubernetes_file_is_an_indexed_job_of_as_many_shards_as_pods():
    spec = yaml.safe_load((SCRIPTS / "kubernetes_job.yaml").read_text())["spec"]
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    args = parse_command(container["args"][0], {"JOB_COMPLETION_INDEX": "3"})
    assert args.shard == (3, spec["completions"])
    rules = {tuple(rule["onExitCodes"]["values"]): rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert {values: rule["action"] for values, rule in rules.items()} == {(143,): "Ignore", (1, 2): "FailJob"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules.values()} == {container["name"]}
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
