"""The harness's model: sums and greedy flags of the canonical pass, whatever the batch; windows, samples, caches, refusals."""

import dataclasses
import hashlib
import json
import math

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model

import detspec as ds
from detspec.adapters.eval_options import EvalOptions
from detspec.adapters.lm_eval import DetspecLM
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.errors import InputError
from tests.engine.byte_model import MAX_LEN, broken_params, byte_tokenizer, make_engine, without_tokenizer

PREFIX = 7
OPTIONS = EvalOptions(prefix_token_id=PREFIX, max_gen_toks=8)
CONTEXTS = ("def fib(n):", "a", "for item in items:\n    ", "x = 3 # " * 4)
CHOICES = ("return", " n", "1", "pass\n    ")
GREEDY = {"until": [], "max_gen_toks": 6}
SAMPLED = {"until": ["\n\n"], "do_sample": True, "temperature": 1.2, "max_gen_toks": 10}


@pytest.fixture(scope="module")
def models(one_row, three_rows, eight_rows) -> list[DetspecLM]:
    return [DetspecLM.over(engine, OPTIONS) for engine in (one_row, three_rows, eight_rows)]


@pytest.fixture(scope="module")
def lm(models) -> DetspecLM:
    return models[1]


def ask(kind: str, *arguments: object) -> Instance:
    return Instance(kind, {}, arguments, 0)


def choices() -> list[Instance]:
    """Four questions of four choices."""
    return [ask("loglikelihood", context, choice) for context in CONTEXTS for choice in CHOICES]


def scored(lm: DetspecLM, texts: list[tuple[list[int], int]]) -> list[list[float]]:
    """Log-probabilities of the functional core for each text from its start on; all at once, in one program."""
    model = lm.engine.model
    found = ds.score(model.params, model.cfg, [ids for ids, _ in texts], schedule=lm.engine.schedule)
    return [logprobs[start:].tolist() for logprobs, (_, start) in zip(found, texts, strict=True)]


def test_harness_knows_the_model_by_its_name():
    assert get_model("detspec") is DetspecLM


def test_sums_are_those_of_the_canonical_pass_in_float64(lm):
    pairs = [lm._encode_pair(*instance.args) for instance in choices()]
    texts = [([*context, *continuation], len(context)) for context, continuation in pairs]
    without_context = [PREFIX, *lm.tok_encode("abc")]
    requests = [*choices(), ask("loglikelihood", "", "abc")]
    totals = [total for total, _ in lm.loglikelihood(requests, disable_tqdm=True)]
    assert totals == [math.fsum(values) for values in scored(lm, [*texts, (without_context, 1)])]


def test_answers_depend_neither_on_the_batch_nor_on_the_order(models):
    expected = models[0].loglikelihood(choices(), disable_tqdm=True)
    assert len(set(expected)) == len(expected)
    for lm in models:
        assert lm.loglikelihood(choices(), disable_tqdm=True) == expected
        assert lm.loglikelihood(choices()[::-1], disable_tqdm=True)[::-1] == expected


@pytest.mark.parametrize("number", [4, 5, 33])
def test_equal_requests_have_one_value_however_many_there_are(models, number):
    """A harness gave -21.84375 for four equal requests, and moved all of them when a fifth came."""
    requests = [ask("loglikelihood", CONTEXTS[0], CHOICES[0])] * number
    found = {answer for lm in models for answer in lm.loglikelihood(requests, disable_tqdm=True)}
    assert len(found) == 1


def test_greedy_is_what_the_model_writes(lm):
    """The model's own bytes are greedy, and no longer so once the last one is another."""
    context = lm.tok_encode(CONTEXTS[0])
    (own,) = lm.engine.generate([context], ds.SamplingParams(max_tokens=3))
    other = [*own.token_ids[:-1], own.token_ids[-1] ^ 1]
    pairs = [(None, context, list(own.token_ids)), (None, context, other)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]


def test_long_context_loses_its_beginning(lm):
    long = "".join(chr(97 + i % 26) for i in range(MAX_LEN + 9))
    kept = long[-(MAX_LEN - 3) :]
    pair = [ask("loglikelihood", context, "xyz") for context in (long, kept, kept[1:])]
    whole, same, shorter = lm.loglikelihood(pair, disable_tqdm=True)
    assert whole == same != shorter


def test_rolling_scores_each_token_once_in_windows(models):
    """Positions of 64: windows of 63 tokens, the first after the prefix, the last with as much context as there is room for."""
    text = "".join(chr(97 + (i * i) % 26) for i in range(150))
    ids = models[0].tok_encode(text)
    windows = [([PREFIX, *ids[:63]], 1), (ids[62:126], 1), (ids[86:150], 40)]
    assert sum(len(window) - start for window, start in windows) == 150
    *parts, short = scored(models[0], [*windows, ([PREFIX, *ids[:20]], 1)])
    expected = [math.fsum(value for part in parts for value in part), 0.0, math.fsum(short)]
    for lm in models:
        requests = [ask("loglikelihood_rolling", text) for text in (text, "", text[:20])]
        assert lm.loglikelihood_rolling(requests, disable_tqdm=True) == expected


def test_texts_end_before_the_first_stop_string(lm):
    (whole,) = lm.generate_until([ask("generate_until", CONTEXTS[0], {**SAMPLED, "until": []})], disable_tqdm=True)
    stop = whole[4:6]
    assert whole.index(stop) > 0
    given = {**SAMPLED, "until": [stop, ""]}
    assert lm.generate_until([ask("generate_until", CONTEXTS[0], given)], disable_tqdm=True) == [whole[: whole.index(stop)]]


def test_repeats_have_noise_of_their_own_and_depend_on_nothing_else(models):
    first, other = (ask("generate_until", context, SAMPLED) for context in CONTEXTS[:2])
    expected = models[0].generate_until([first] * 4, disable_tqdm=True)
    assert len(set(expected)) == 4
    for lm in models:
        assert lm.generate_until([first, other, first, other, first, first], disable_tqdm=True)[::2][:2] == expected[:2]
        again = ask("generate_until", CONTEXTS[0], dict(SAMPLED))  # an equal document of another task
        assert lm.generate_until([other, again, first], disable_tqdm=True)[1:] == [expected[0]] * 2
    seeded = DetspecLM.over(models[0].engine, EvalOptions(prefix_token_id=PREFIX, seed=1))
    assert seeded.generate_until([first], disable_tqdm=True) != expected[:1]


def test_empty_context_is_generated_after_the_prefix(lm):
    (out,) = lm.engine.generate([[PREFIX]], ds.SamplingParams(max_tokens=6))
    assert lm.generate_until([ask("generate_until", "", GREEDY)], disable_tqdm=True) == [out.text]


def test_cache_of_the_harness_keeps_answers_but_no_samples(lm, tmp_path):
    cached = CachingLM(lm, str(tmp_path / "answers.db"))
    requests = choices()[:3]
    expected = cached.loglikelihood(requests)
    greedy, sampled = (ask("generate_until", CONTEXTS[0], given) for given in (GREEDY, SAMPLED))
    cached.loglikelihood_rolling([ask("loglikelihood_rolling", CONTEXTS[0])])
    cached.generate_until([greedy])
    num_kept = len(cached.dbdict)
    lm.generate_until([sampled], disable_tqdm=True)
    assert num_kept == len(cached.dbdict) == 5
    cached.dbdict.update(dict.fromkeys(cached.dbdict, (1.5, True)))
    assert cached.loglikelihood(requests) == [(1.5, True)] * 3 != expected
    lm.set_cache_hook(type(lm.cache_hook)(None))


def test_model_info_names_all_that_bits_depend_on(lm):
    info = lm.get_model_info()
    assert info["fingerprint"] == lm.engine.fingerprint()
    assert info["fingerprint_digest"] == hashlib.sha256(json.dumps(info["fingerprint"], sort_keys=True).encode()).hexdigest()
    assert info["max_length"] == MAX_LEN - 1
    assert info["model_options"]["prefix_token_id"] == PREFIX


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("generate_until", ("a", {"beam_width": 3}), "does not take the generation argument 'beam_width'"),
        ("generate_until", ("a", {"max_gen_toks": 63}), "max_gen_toks is 63, accepted are numbers below max_length"),
        ("generate_until", ("a", {"do_sample": True, "top_p": 2.0}), "top_p must be a number in"),
        ("loglikelihood", ("a", "b" * 64), "1 tokens of context and 64 that follow"),
        ("loglikelihood", ("a", ""), "1 tokens of context and 0 that follow"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(lm, kind, arguments, message):
    with pytest.raises(InputError, match=message):
        getattr(lm, kind)([ask(kind, *arguments)], disable_tqdm=True)
    assert not lm.engine.has_work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 2}, "the model detspec has no argument 'tensor_parallel_size'; accepted are pretrained"),
        ({"pretrained": "a", "path": "b"}, "pretrained and path both name the model"),
        ({"batch_size": 4, "max_requests": 8}, r"batch_size \(4\) and max_requests \(8\) are the same"),
        ({"deterministic": 1}, "deterministic must be of type bool, got 1"),
    ],
)
def test_arguments_of_the_model_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        DetspecLM.create_from_arg_obj(arguments, {"batch_size": None, "device": "cuda:0"})


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    model = without_tokenizer(broken_params(ord("b") - 33))  # ids of printable bytes begin at "!"
    model = dataclasses.replace(model, tokenizer=Tokenizer(tmp_path / "tokenizer.json"))
    lm = DetspecLM.over(make_engine(model, 3, "none"), OPTIONS)
    with pytest.raises(InputError, match="request 1 failed: the model gave logits that are not finite"):
        lm.loglikelihood([ask("loglikelihood", "a", choice) for choice in ("aa", "ba")], disable_tqdm=True)
