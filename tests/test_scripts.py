"""Job files for clusters: their syntax, and that the commands in them are commands of ours."""

import argparse
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import yaml

from detspec.cli.commands import make_parser

SCRIPTS = Path(__file__).parents[1] / "scripts"


def parse_command(text: str) -> argparse.Namespace:
    """The arguments of the `exec detspec ...` or `srun detspec ...` in a shell text."""
    [command] = re.findall(r"^(?:exec|srun) .*", text.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(command, comments=True)
    [place] = [place for place, word in enumerate(words) if word in ("detspec", "$VENV/bin/detspec")]
    return make_parser().parse_args(words[place + 1 :])


def check_shell(path: Path) -> set[str]:
    """Lets bash read a file for Slurm; returns its options."""
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, check=True).stderr == b""
    return set(re.findall(r"^#SBATCH (--\S+)", path.read_text(), re.MULTILINE))


def test_slurm_file_is_bash_and_runs_a_worker_a_task():
    path = SCRIPTS / "slurm_array.sbatch"
    text = path.read_text()
    assert {"--requeue", "--signal=B:TERM@60", "--array=0-3"} <= check_shell(path)
    args = parse_command(text)
    assert (args.shard, args.double_check) == ("auto", 0.01)
    assert "export JAX_NUM_PROCESSES=1\n" in text


def test_merging_on_a_cluster_joins_what_the_workers_there_write():
    array = (SCRIPTS / "slurm_array.sbatch").read_text()
    path = SCRIPTS / "slurm_merge.sbatch"
    merge = path.read_text()
    check_shell(path)
    submitted = "sbatch --dependency=afterany:$job scripts/slurm_merge.sbatch"
    assert submitted in array
    assert submitted in merge
    for name in ("VENV", "OUT"):
        values = [re.search(rf"^{name}=(\S+)", text, re.MULTILINE)[1] for text in (array, merge)]
        assert values[0] == values[1]
    assert parse_command(merge).run.__module__ == "detspec.cli.merge"

    jobs = [yaml.safe_load((SCRIPTS / f"kubernetes_{name}.yaml").read_text()) for name in ("job", "merge")]
    workers, joining = (job["spec"]["template"]["spec"] for job in jobs)
    assert workers["volumes"] == joining["volumes"]
    (worker,), (join,) = workers["containers"], joining["containers"]
    assert (worker["image"], worker["volumeMounts"]) == (join["image"], join["volumeMounts"])
    assert make_parser().parse_args(join["command"][1:]).out == parse_command(worker["args"][0]).out


def test_image_has_all_that_the_wheel_is_made_of_and_what_its_kernels_need():
    """Files that are copied are let in by .dockerignore, and pyproject.toml needs no others."""
    text = (SCRIPTS.parent / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines()]
    copied = [name for line in lines if line[:1] == ["COPY"] and line[1] != "--from=wheel" for name in line[1:-1]]
    let_in = re.findall(r"^!(\S+)", (SCRIPTS.parent / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(let_in)
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], project["name"], "pyproject.toml"} == set(copied)
    extras = re.search(r"ARG EXTRAS=(\S+)", text)[1].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    assert re.search(r"install .* gcc libc6-dev", text)
    assert lines[-1] == ["ENTRYPOINT", '["detspec"]']


def test_kubernetes_file_is_a_job_of_workers_that_end_together():
    spec = yaml.safe_load((SCRIPTS / "kubernetes_job.yaml").read_text())["spec"]
    assert "completions" not in spec  # a work queue: no pod is started once one has ended well
    assert spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    args = parse_command(container["args"][0])
    assert (args.shard, args.double_check) == ("auto", 0.01)
    assert {"name": "JAX_NUM_PROCESSES", "value": "1"} in container["env"]
    rules = {tuple(rule["onExitCodes"]["values"]): rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert {values: rule["action"] for values, rule in rules.items()} == {(143,): "Ignore", (1, 2): "FailJob"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules.values()} == {container["name"]}
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]


def test_slurm_file_of_a_mesh_is_bash_and_runs_one_process_a_node():
    path = SCRIPTS / "slurm_mesh.sbatch"
    text = path.read_text()
    assert {"--requeue", "--signal=TERM@120", "--ntasks-per-node=1"} <= check_shell(path)
    assert 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" ' in text
    assert parse_command(text).shard is None


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
    assert parse_command(container["args"][0]).shard is None
    codes = {code for rule in spec["podFailurePolicy"]["rules"] for code in rule.get("onExitCodes", {}).get("values", ())}
    assert 75 not in codes
