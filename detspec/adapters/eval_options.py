"""Arguments of the harness: those of the model `detspec` make an engine, those of a generation make sampling parameters.

Each is mapped, or refused by name.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model, cast_params, load, say_loading
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.environment import default_schedule
from detspec.errors import InputError, shown
from detspec.model.loading import Loading
from detspec.plain import plain
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of

MAX_LEN = 2048  # the harness's default where a model names no limit
PREFILL_PASSES = 16  # an evaluation wants throughput, not low latency
# Generation arguments that have our names and meanings, that are mapped, and the only value that is accepted of others.
SAME: tuple[str, ...] = (
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)
SAME += ("stop_token_ids", "ignore_eos", "thinking")
MAPPED = ("do_sample", "temperature", "max_gen_toks", "until", "stop", "seed")
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1}


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """How a model is loaded, and how the harness's requests run.

    Attributes:
        max_len: positions of a request, context and continuation together; 2048 or the model's limit if None. Longer contexts
            lose their beginning, so scores depend on it.
        max_requests: most requests in flight; changes speed alone.
        dtype: dtype of the weights, "auto" as the folder has them. "float32" is another model than "bfloat16".
        weights: "int8" rounds the matrices, see `load`.
        long_texts: rotations as for texts beyond the original length, see `load`.
        cache_dtype: dtype of keys and values, the device's choice if None; decides bits.
        method: the draft source of `generate_until`; changes speed alone.
        chips: how many devices the model is cut over.
        deterministic: verify what `generate_until` generates. Scores are canonical in any case.
        seed: makes the seeds of sampled texts, together with the prompt and the number of the repeat.
        max_gen_toks: most new tokens of requests that name no number.
        prefix_token_id: first token of texts without a context; the tokenizer's beginning of text if None, else its end.
    """

    max_len: int | None = None
    max_requests: int = 32
    dtype: str = "auto"
    weights: str | None = None
    long_texts: bool = False
    cache_dtype: str | None = None
    method: str = "auto"
    chips: int = 1
    deterministic: bool = True
    seed: int = 0
    max_gen_toks: int = 256
    prefix_token_id: int | None = None

    @property
    def loading(self) -> Loading:
        """How the model is loaded."""
        return Loading(self.weights, self.long_texts)


def options_of(arguments: dict[str, Any], *, batch_size: int | str | None, max_batch_size: int | None) -> EvalOptions:
    """The options in `arguments`, by name; a number as `batch_size` is `max_requests`, and "auto" is the default.

    Raises `InputError` for names that there are not, and for values of another kind.
    """
    names = [field.name for field in dataclasses.fields(EvalOptions)]
    if unknown := [name for name in arguments if name not in names]:
        raise InputError(f"the model detspec has no argument {unknown[0]!r}; accepted are pretrained, path, {', '.join(names)}")
    size = None if batch_size is None or str(batch_size).startswith("auto") else batch_size
    if size is not None and not str(size).isdecimal():
        raise InputError(f'batch_size must be "auto" or a number of requests, got {batch_size!r}')
    sizes = {"batch_size": size, "max_requests": arguments.get("max_requests")}
    if None not in sizes.values():
        raise InputError(f"batch_size ({size}) and max_requests ({sizes['max_requests']}) are the same: give one of them")
    most = next((number for number in (*sizes.values(), max_batch_size) if number is not None), EvalOptions.max_requests)
    options = EvalOptions(**{**arguments, "max_requests": int(most)})
    for name in ("long_texts", "deterministic", "seed", "max_gen_toks"):
        kind = type(getattr(EvalOptions, name))
        if type(getattr(options, name)) is not kind:
            raise InputError(f"{name} must be of type {kind.__name__}, got {getattr(options, name)!r}")
    return options


def load_engine(model: Model | str | Path | None, options: EvalOptions) -> Engine:
    """An engine for `model`, a loaded one, a folder, or a shipped model's name; raises `InputError` as `load` does."""
    if not isinstance(model, Model):
        say_loading(model)
        model = load(model, chips=options.chips, **options.loading.keywords)
    if options.dtype != "auto":
        cfg, params = cast_params(model.cfg, model.params, options.dtype)
        if cfg != model.cfg:
            model = dataclasses.replace(model, cfg=cfg, params=params, digest=digest_model(cfg, params))
    schedule = None
    if options.cache_dtype is not None:
        schedule = default_schedule(model.cfg).with_numerics(cache_dtype=options.cache_dtype)
    config = EngineConfig(
        max_requests=options.max_requests,
        max_len=min(MAX_LEN, model.cfg.max_position) if options.max_len is None else options.max_len,
        method=options.method,
        max_prefill_passes=PREFILL_PASSES,
        schedule=schedule,
    )
    return Engine(model, config)


def sampling_of(
    given: Mapping[str, Any], prompt: str, occurrence: int, *, seed: int, max_gen_toks: int, deterministic: bool
) -> SamplingParams:
    """The sampling parameters of one request.

    Args:
        given: generation arguments after the harness's `normalize_gen_kwargs`. Arguments that are None are not given. Without
            `do_sample`, texts are sampled if there is a temperature.
        prompt: the context.
        occurrence: how many equal requests of the same document came before; each gets noise of its own.
        seed: makes the seed if `given` has none.
        max_gen_toks: most new tokens if `given` has no number.
        deterministic: whether what is generated is verified.

    Raises:
        InputError: an argument is unknown, or has a value that is not accepted.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in WITHOUT_EFFECT and (isinstance(value, bool) or plain(value) != WITHOUT_EFFECT[name]):
            raise InputError(f"generation argument {name} must be {WITHOUT_EFFECT[name]}, got {shown(value)}: leave it out")
        if name not in (*SAME, *MAPPED, *WITHOUT_EFFECT):
            accepted = ", ".join((*MAPPED, *SAME))
            raise InputError(f"the model detspec does not take the generation argument {name!r}; accepted are {accepted}")
    stops = [*_texts("until", given.get("until", [])), *_texts("stop", given.get("stop", []))]
    sampled = SamplingParams(
        max_tokens=_whole("max_gen_toks", given.get("max_gen_toks", max_gen_toks), least=1),
        temperature=given.get("temperature", 1.0),
        seed=seed_of(_whole("seed", given.get("seed", seed)), prompt, occurrence),
        stop=tuple(dict.fromkeys(stop for stop in stops if stop)),
        deterministic=deterministic,
        **{name: given[name] for name in SAME if name in given},
    )
    do_sample = given.get("do_sample", "temperature" in given)
    if not isinstance(do_sample, bool):
        raise InputError(f"generation argument do_sample must be true or false, got {shown(do_sample)}")
    return sampled if do_sample else dataclasses.replace(sampled, temperature=0.0)


def _whole(name: str, value: Any, *, least: float = -math.inf) -> int:
    """An integer of any kind as a plain one."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        sentence = f"an integer of at least {least}" if least > -math.inf else "an integer"
        raise InputError(f"generation argument {name} must be {sentence}, got {shown(value)}")
    return number


def _texts(name: str, value: Any) -> list[str]:
    """Lists one text or several."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"generation argument {name} must be a text or a list of texts, got {shown(value)}")
    return list(texts)
