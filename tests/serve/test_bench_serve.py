"""`scripts/bench_serve.py` against a server in this process."""

import contextlib
import io
import json

import pytest

from scripts import bench_serve
from tests.serve.running import make_engine, serving


@pytest.mark.slow
def test_results_have_the_names_of_vllms_and_say_what_failed(model, tmp_path):
    with serving(make_engine(model)) as server:
        shape = ["--random-input-len", "8", "--random-output-len", "4", "--random-range-ratio", "0.5", "--vocab-size", "128"]
        command = ["--port", server.url.rpartition(":")[2], "--model", "bytes", "--num-prompts", "12", *shape]
        saved = ["--save-result", "--result-dir", str(tmp_path / "results"), "--result-filename", "found.json"]
        limits = ["--request-rate", "200", "--goodput", "ttft:60000", "e2el:0.001", "--deterministic-ratio", "0.5"]
        status, out, _ = run([*command, *limits, *saved])
        assert status == 0
        found = json.loads((tmp_path / "results/found.json").read_text())
        assert (found["completed"], found["failed"], found["request_goodput"]) == (12, 0, 0.0)
        assert 12 * 4 <= found["total_input_tokens"] <= 12 * 12
        assert 12 * 2 <= found["total_output_tokens"] <= 12 * 6
        for metric in ("ttft", "tpot", "itl", "e2el"):
            assert found[f"p99_{metric}_ms"] >= found[f"median_{metric}_ms"] > 0
        assert "p99_ttft_ms" in out
        status, _, errors = run([*command, "--random-output-len", "1000"])
        assert (status, "max_len" in errors) == (1, True)


def run(command: list[str]) -> tuple[int, str, str]:
    """Exit code and what is printed. Not by `capsys`, whose files the server's loggers would keep."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = bench_serve.main(command)
    return status, out.getvalue(), errors.getvalue()


@pytest.mark.parametrize(("ratio", "lengths"), [(0.0, {8}), (1.0, set(range(1, 17)))])
def test_lengths_differ_by_up_to_the_ratio(ratio, lengths, monkeypatch):
    sent = []
    monkeypatch.setattr(bench_serve, "marked", lambda bodies, *_: sent.extend(bodies) or [])
    bench_serve.main(["--random-input-len", "8", "--random-range-ratio", str(ratio), "--num-prompts", "500"])
    assert {len(body["prompt"]) for body in sent} == lengths
