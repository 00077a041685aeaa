"""Prompts in parquet files and folders of datasets: rows are lines, so what holds for lines holds for rows."""

import dataclasses
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from detspec.errors import InputError
from detspec.jobs.files import shard_path, sibling
from detspec.jobs.job import run_job
from detspec.jobs.merge import merge
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.jobs.records import Origin, PromptsById
from detspec.jobs.tables import open_prompts
from detspec.jobs.worker import WorkerOptions, run_worker
from detspec.sampling_params import SamplingParams
from tests.jobs.paced import PacedEngine

DEFAULTS = SamplingParams(max_tokens=4)
NUM_ROWS = 23
ROWS = {
    "key": list(range(100, 100 + NUM_ROWS)),
    "prompt": [f"def f{i}(x):" for i in range(NUM_ROWS)],
    "token_ids": [[i, i + 1] for i in range(NUM_ROWS)],
    "messages": [[{"role": "user", "content": f"{i}", "name": None if i % 2 else "n"}] for i in range(NUM_ROWS)],
}


def write_parquet(folder: Path, rows: dict = ROWS) -> str:
    path = folder / "in.parquet"
    parquet.write_table(pa.table(rows), path, row_group_size=5)
    return str(path)


def write_dataset(folder: Path, rows: dict = ROWS, **state) -> str:
    """Two streams of small batches and a state, as `save_to_disk` writes them."""
    path = folder / "dataset"
    path.mkdir()
    table = pa.table(rows)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 10), table.slice(10)), strict=True):
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part, max_chunksize=4)
    files = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (path / "state.json").write_text(json.dumps({**files, **state}))
    (path / "dataset_info.json").write_text("{}")
    return str(path)


def lines_of(folder: Path, key: str, *, ids: bool = True) -> Path:
    """The prompts as lines."""
    name = {"token_ids": "prompt_token_ids"}.get(key, key)
    path = folder / "lines.jsonl"
    lines = [{"id": str(ROWS["key"][i] if ids else i), name: ROWS[key][i]} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def engine() -> PacedEngine:
    return PacedEngine(lambda seconds: None)


def parsed(prompts) -> list[dict]:
    return [json.loads(raw) for _, raw in prompts.lines()]


@pytest.fixture(params=[write_parquet, write_dataset])
def source(request, tmp_path) -> str:
    return request.param(tmp_path)


@pytest.mark.parametrize("key", ["prompt", "token_ids"])
def test_rows_are_read_as_lines(source, key, tmp_path):
    prompts = open_prompts(source, column=key, id_column="key")
    with Prompts(str(lines_of(tmp_path, key))) as lines:
        assert parsed(prompts) == parsed(lines)
        assert [(mark.number, mark.place) for mark, _ in prompts.lines()] == [(i, i + 1) for i in range(NUM_ROWS)]


def test_conversations_lose_fields_that_are_null(source):
    found = parsed(open_prompts(source, column="messages"))
    assert found[0] == {"id": "0", "messages": [{"role": "user", "content": "0", "name": "n"}]}
    assert found[1] == {"id": "1", "messages": [{"role": "user", "content": "1"}]}


def test_reading_may_begin_at_any_row(source):
    prompts = open_prompts(source)
    everything = list(prompts.lines())
    marks = list(prompts.marks(1))
    assert len(marks) == NUM_ROWS
    for mark in marks:
        assert list(prompts.lines(mark)) == everything[mark.number :]
    assert [mark.number for mark in prompts.marks(10)] == [0, 10, 20]


def test_columns_are_part_of_what_is_hashed(source):
    digests = {
        open_prompts(source, column=column, id_column=ids).sha256 for column in ("prompt", "token_ids") for ids in (None, "key")
    }
    assert len(digests) == 4
    assert open_prompts(source).sha256 == open_prompts(source, column="prompt").sha256


TRAVELLING = {"metadata": [{"label": i, "source": {"book": f"b{i}", "pages": [i, 7], "share": i / 4}} for i in range(NUM_ROWS)]}


def write_lines(folder: Path) -> Path:
    """All rows as lines, with metadata."""
    path = lines_of(folder, "token_ids")
    lines = [
        {**json.loads(line), "metadata": TRAVELLING["metadata"][i]} for i, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_shards(folder: Path, *, texts: bool = False) -> str:
    """Four parquet files; `texts` has metadata as JSON."""
    path = folder / f"shards{texts}"
    path.mkdir()
    metadata = [json.dumps(one) for one in TRAVELLING["metadata"]] if texts else TRAVELLING["metadata"]
    table = pa.table({**ROWS, "metadata": metadata})
    for i in range(4):
        parquet.write_table(table.slice(i * 6, 6), path / f"train-{i:05}-of-00004.parquet", row_group_size=4)
    return str(path)


def all_sources(folder: Path) -> list[str]:
    """Writes equal prompts in every form."""
    lines = write_lines(folder).read_bytes()
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "in.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    rows = {**ROWS, **TRAVELLING}
    feather.write_feather(pa.table(rows), folder / "in.feather", chunksize=5)
    with pa.OSFile(str(folder / "in.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.table(rows).schema) as writer:
        writer.write_table(pa.table(rows), max_chunksize=5)
    named = [str(folder / name) for name in ("lines.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.feather", "in.arrow")]
    tables = [write_parquet(folder, rows), write_dataset(folder, rows), write_shards(folder), write_shards(folder, texts=True)]
    return [*named, *tables]


def opened(source: str):
    is_table = ".jsonl" not in source
    return open_prompts(source, **({"column": "token_ids", "id_column": "key"} if is_table else {}))


def test_output_has_the_same_bytes_from_every_form_of_the_same_prompts(tmp_path):
    two = dataclasses.replace(DEFAULTS, n=2)
    outputs = set()
    for number, source in enumerate(all_sources(tmp_path)):
        with opened(source) as prompts:
            run_job(engine(), JobSpec(prompts, two), tmp_path / f"{number}.out")
        outputs.add((tmp_path / f"{number}.out").read_bytes())
    assert number == 8
    (whole,) = outputs
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["metadata"] for line in lines] == [one for one in TRAVELLING["metadata"] for _ in range(2)]


@pytest.mark.parametrize("form", [write_shards, lambda folder: str(all_sources(folder)[1])], ids=["shards", "gzip"])
def test_resumed_jobs_fixed_shards_and_workers_give_the_bytes_of_one_job(form, tmp_path):
    source = form(tmp_path)
    outputs = [tmp_path / name for name in ("whole.jsonl", "resumed.jsonl", "merged.jsonl", "workers.jsonl")]
    num_steps = 0

    def die(seconds: float) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 9:
            raise RuntimeError("killed")

    with opened(source) as prompts:
        spec = JobSpec(prompts, DEFAULTS)
        run_job(engine(), spec, outputs[0])
        with pytest.raises(RuntimeError, match="killed"):
            run_job(PacedEngine(die), spec, outputs[1])
    with opened(source) as prompts:
        spec = JobSpec(prompts, DEFAULTS)
        result = run_job(engine(), spec, outputs[1])
        assert 0 < result.stats["num_resumed"] < NUM_ROWS
        for index in range(3):
            run_job(engine(), dataclasses.replace(spec, shard=(index, 3)), shard_path(outputs[2], index, 3))
        merge(outputs[2])
        run_worker(engine(), spec, outputs[3], WorkerOptions(chunk_lines=4))
        merge(outputs[3])
    assert len({path.read_bytes() for path in outputs}) == 1


def test_jobs_and_workers_of_tables_give_the_bytes_of_those_of_lines(source, tmp_path):
    outputs = [tmp_path / name for name in ("lines.out", "job.out", "workers.out")]
    with Prompts(str(lines_of(tmp_path, "token_ids"))) as lines:
        run_job(engine(), JobSpec(lines, DEFAULTS), outputs[0])
    rows = open_prompts(source, column="token_ids", id_column="key")
    run_job(engine(), JobSpec(rows, DEFAULTS), outputs[1])
    run_worker(engine(), JobSpec(rows, DEFAULTS), outputs[2], WorkerOptions(chunk_lines=4))
    merge(outputs[2])
    assert len({path.read_bytes() for path in outputs}) == 1
    manifest = json.loads(sibling(outputs[2], "manifest").read_text())
    assert (manifest["prompts"]["column"], manifest["prompts"]["id_column"]) == ("token_ids", "key")


def test_audit_finds_the_prompts_of_records_in_any_order(source):
    check_order(source)


def test_audit_finds_prompts_in_shards(tmp_path):
    check_order(write_shards(tmp_path))
    with pytest.raises(InputError, match="has SHA-256"):
        PromptsById(Path(write_shards(tmp_path, texts=True)), origin_of(opened(str(tmp_path / "shardsFalse")).sha256))


def origin_of(sha256: str) -> Origin:
    """Facts that an audit knows of a job that read `token_ids` by `key`."""
    columns = {"column": "token_ids", "id_column": "key"}
    return Origin("", {}, {}, DEFAULTS, engine().config, source="", sha256=sha256, **columns)


def check_order(source: str) -> None:
    sha256 = open_prompts(source, column="token_ids", id_column="key").sha256
    with PromptsById(Path(source), origin_of(sha256)) as asked:
        for row in (3, 4, 5, 0, 22, 21):
            request, _ = asked.asked(str(100 + row), engine().model)
            assert request.prompt_token_ids == (row, row + 1)


def test_memory_holds_no_more_than_a_row_group(tmp_path):
    """20 MB of prompts in groups of 1 MB."""
    rows = 200
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"prompt": [f"{i}" + "x" * 100_000 for i in range(rows)]}), path, row_group_size=10)
    pa.default_memory_pool().release_unused()
    before = pa.total_allocated_bytes()
    most = 0
    prompts = open_prompts(str(path))
    for _ in prompts.lines():
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 5_000_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"column": "nothing"}, "has no column 'nothing': name one of key, prompt, token_ids, messages with --column"),
        ({"id_column": "nothing"}, "with --id-column"),
        ({"column": "key"}, "column 'key' holds int64; accepted are texts, lists of integers"),
    ],
)
def test_wrong_columns_are_named(source, options, said):
    with pytest.raises(InputError, match=said):
        open_prompts(source, **options)


def test_what_is_no_table_is_one_error(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    wrong = {
        "a.parquet": "no table that can be read",
        "empty": "without state.json",
        "splits": "several splits: name one of .*train",
    }
    wrong["missing.parquet"] = "No such file"
    for name, said in wrong.items():
        with pytest.raises(InputError, match=said):
            open_prompts(str(tmp_path / name))
    (tmp_path / "empty" / "state.json").write_text('{"_data_files": [{"filename": "../x"}]}')
    with pytest.raises(InputError, match="names no files"):
        open_prompts(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="none of the columns prompt, messages"):
        open_prompts(write_parquet(tmp_path, {"x": [1]}))
    with pytest.raises(InputError, match="flatten_indices"):
        open_prompts(write_dataset(tmp_path, _indices_data_files=[{"filename": "i"}]))
    with pytest.raises(InputError, match="holds lines"):
        open_prompts(str(lines_of(tmp_path, "prompt")), column="prompt")


def test_table_that_changes_under_the_job_is_refused(tmp_path):
    source = write_parquet(tmp_path)
    prompts = open_prompts(source)
    write_parquet(tmp_path, {"prompt": ["a"] * 3})
    with pytest.raises(InputError, match="was changed while the job read it"):
        list(prompts.lines())
