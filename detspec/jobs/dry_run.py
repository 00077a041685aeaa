"""`--dry-run`: what a job will need, found without compiling, generating or writing anything."""

from pathlib import Path

from detspec.cache import cache_bytes
from detspec.engine.engine import Engine
from detspec.engine.policy import needed_plans
from detspec.jobs.files import journal_path
from detspec.jobs.journal import read_journal
from detspec.jobs.manifest import complete_manifest, describe_model, job_header
from detspec.jobs.output import check_free
from detspec.jobs.prompts import JobSpec
from detspec.jobs.scan import Scan, read_lines
from detspec.model.params import params_bytes


def plan_job(engine: Engine, spec: JobSpec, out: Path | None) -> str:
    """Checks the job `spec`, which `engine` would generate, and describes it as lines of text.

    `out`, its manifest and its journal are looked at, if it is not None. Raises `InputError` as `run_job` does.
    """
    with read_lines(engine, spec, keep=False) as reading:
        found = reading.found
    header = job_header(engine, spec)
    num_kept = 0
    num_todo = found.num_completions
    if out is not None:
        check_free(out, header)
    if out is not None and complete_manifest(out, header):
        num_kept = found.num_completions
        num_todo = 0
    elif out is not None and (journal := read_journal(journal_path(out), header)):
        journal.load(found.first, found.counts)
        num_kept = journal.num_kept
        num_todo = journal.num_todo
    cfg = engine.model.cfg
    config = engine.config
    numerics = engine.schedule.numerics
    cache = cache_bytes(
        cfg, max_requests=config.max_requests, max_len=config.max_len, numerics=numerics, num_pages=engine.num_pages
    )
    plans = needed_plans(config, engine.schedule, num_todo, found.needs)
    lines = {
        "model": f"{describe_model(engine.model)}, {params_bytes(engine.model.params):,} bytes",
        "cache": f"{cache:,} bytes, {engine.num_pages:,} pages of {numerics.page} slots, {numerics.cache_dtype}",
        "engine": f"{engine.num_places} requests in flight, max_len {config.max_len}, method {', '.join(config.methods)}",
        "schedule": ", ".join(f"{name} {value}" for name, value in engine.schedule.bits().items()),
        "requests": f"{found.num_requests:,} of {found.num_lines:,} lines (shard {spec.shard[0]}/{spec.shard[1]})",
        "rejected": f"{found.num_bad if spec.is_openai else found.num_rejected:,} lines",
        "prompt tokens": f"{found.num_prompt_tokens:,}, at most {found.longest_prompt:,} each",
        "new tokens": f"at most {found.num_new_tokens:,}, at most {found.most_new_tokens:,} each",
        "kept": f"{num_kept:,} of {found.num_completions:,} completions",
        "programs": f"{len(plans)} to compile at most: {', '.join(plan.label for plan in plans) or 'none'}",
        "passes": f"at least {least_passes(engine, found):,} if nothing stops early and nothing is kept",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines.items())


def least_passes(engine: Engine, found: Scan) -> int:
    """Lower bound of canonical passes, even if every draft is accepted: a pass prefills or commits at most `rows` tokens."""
    config = engine.config
    schedule = engine.schedule
    window = 1 if config.methods == ("none",) else config.num_speculative_tokens + 1
    most_committed = min(schedule.budget.rows, config.max_requests * window)
    prefill = -(-(found.num_prompt_tokens - found.num_requests) // schedule.budget.rows)
    decode = max(-(-found.num_new_tokens // most_committed), -(-found.most_new_tokens // window))
    return prefill + decode
