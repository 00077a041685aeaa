"""Arguments of the harness's model: batch sizes, names and kinds."""

import pytest

from detspec.adapters.eval_options import EvalOptions, load_engine, options_of
from detspec.errors import InputError
from tests.engine.byte_model import byte_params, without_tokenizer


@pytest.mark.parametrize(
    ("batch_size", "max_batch_size", "arguments", "expected"),
    [("auto", None, {}, 32), ("auto:4", 16, {}, 16), (None, None, {"max_requests": 5}, 5), ("8", 16, {}, 8), (1, None, {}, 1)],
)
def test_batch_size_is_the_number_of_requests(batch_size, max_batch_size, arguments, expected):
    assert options_of(arguments, batch_size=batch_size, max_batch_size=max_batch_size) == EvalOptions(max_requests=expected)


@pytest.mark.parametrize(
    ("arguments", "batch_size", "message"),
    [
        ({"tensor_parallel_size": 2}, "auto", "no argument 'tensor_parallel_size'; accepted are pretrained, path, max_len"),
        ({"max_requests": 8}, 4, r"batch_size \(4\) and max_requests \(8\) are the same"),
        ({}, "many", "batch_size must be \"auto\" or a number of requests, got 'many'"),
        ({"deterministic": 1}, "auto", "deterministic must be of type bool, got 1"),
        ({"seed": "a"}, "auto", "seed must be of type int, got 'a'"),
        ({"max_gen_toks": 0.5}, "auto", "max_gen_toks must be of type int, got 0.5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, batch_size, message):
    with pytest.raises(InputError, match=message):
        options_of(arguments, batch_size=batch_size, max_batch_size=None)


def test_engine_has_the_model_and_the_lengths_that_were_asked_for():
    model = without_tokenizer(byte_params())
    engine = load_engine(model, EvalOptions(max_requests=3, dtype="float32", cache_dtype="bfloat16"))
    assert (engine.config.max_requests, engine.config.max_len) == (3, model.cfg.max_position)
    assert (engine.model.cfg.dtype, engine.schedule.numerics.cache_dtype) == ("float32", "bfloat16")
    assert engine.model.digest != model.digest


def test_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="dtype"):
        load_engine(without_tokenizer(byte_params()), EvalOptions(dtype="float8"))
