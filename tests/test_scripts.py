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


def test_slurm_file_is_bash_and_runs_a_worker_a_task():
    path = SCRIPTS / "slurm_array.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, check=True).stderr == b""
    text = path.read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    assert {"--requeue", "--signal=B:TERM@60", "--array=0-3"} <= set(options)
    args = parse_command(text, {})
    assert (args.shard, args.double_check) == ("auto", 0.01)
    assert "export JAX_NUM_PROCESSES=1\n" in text


def test_kubernetes_file_is_a_job_of_workers_that_end_together():
    spec = yaml.safe_load((SCRIPTS / "kubernetes_job.yaml").read_text())["spec"]
    assert "completions" not in spec  # a work queue: no pod is started once one has ended well
    assert spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    args = parse_command(container["args"][0], {})
    assert (args.shard, args.double_check) == ("auto", 0.01)
    assert {"name": "JAX_NUM_PROCESSES", "value": "1"} in container["env"]
    rules = {tuple(rule["onExitCodes"]["values"]): rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert {values: rule["action"] for values, rule in rules.items()} == {(143,): "Ignore", (1, 2): "FailJob"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules.values()} == {container["name"]}
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]


def test_slurm_file_of_a_mesh_is_bash_and_runs_one_process_a_node():
    path = SCRIPTS / "slurm_mesh.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, check=True).stderr == b""
    text = path.read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    assert {"--requeue", "--signal=TERM@120", "--ntasks-per-node=1"} <= set(options)
    started = "srun --kill-on-bad-exit=1 "
    assert parse_command(text.replace(started, "exec "), {}).shard is None


def test_kubernetes_file_of_a_mesh_runs_all_pods_at_once_and_names_the_first():
    service, job = yaml.safe_load_all((SCRIPTS / "kubernetes_mesh.yaml").read_text())
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["JAX_NUM_PROCESSES"] == str(spec["completions"])
    assert environment["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert "JAX_PROCESS_ID" in environment
    assert parse_command(container["args"][0], {}).shard is None
    codes = {code for rule in spec["podFailurePolicy"]["rules"] for code in rule.get("onExitCodes", {}).get("values", ())}
    assert 75 not in codes
