"""Detspec as a model of the lm-evaluation-harness: `--model detspec`, once this file has been imported.

A request's answer is a function of the request alone: contexts that requests share are read once, and neither the batch size
nor the order of tasks moves a bit.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from detspec.adapters.eval_options import EvalOptions, load_engine, options_of, sampling_of
from detspec.adapters.special_tokens import SpecialTokens, special_tokens_of
from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.intake import check_request
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.model.params import num_params
from detspec.sampling_params import SamplingParams

SCORING = SamplingParams(logprobs=1)  # log-probabilities of the model itself, and the likeliest token
FAILED = "error"
Pair = tuple[list[int], list[int]]  # token ids of a context, and of what is scored after it


@register_model("detspec")
class DetspecLM(TemplateLM):
    """The harness's view of an engine.

    Attributes:
        engine: the engine that runs.
        options: how it runs.
        max_length: most tokens that are read before the last one that is scored or generated; one less than `max_len`.
    """

    def __init__(
        self,
        pretrained: Model | str | Path | None = None,
        *,
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        """Loads a model and makes its engine; `arguments` are fields of `EvalOptions`.

        Args:
            pretrained: a folder, a shipped model's name, or a model that is loaded; the shipped model if None. The argument
                `path` is the same.
            batch_size: "auto", or most requests in flight. It changes speed alone.
            max_batch_size: the value of "auto".
            device: not looked at, because the harness always gives one: the model runs where jax puts it.

        Raises:
            InputError: there is no such argument, or no such model.
        """
        if pretrained is not None and "path" in arguments:
            raise InputError("pretrained and path both name the model: give one of them")
        source = arguments.pop("path", pretrained)
        options = options_of(arguments, batch_size=batch_size, max_batch_size=max_batch_size)
        self._wrap(load_engine(source, options), options)

    @classmethod
    def over(cls, engine: Engine, options: EvalOptions | None = None) -> "DetspecLM":
        """Wraps an engine that is there; of `options`, those about requests count."""
        model = cls.__new__(cls)
        model._wrap(engine, options or EvalOptions())
        return model

    def _wrap(self, engine: Engine, options: EvalOptions) -> None:
        super().__init__()
        self.engine = engine
        self.options = options
        self.max_length = engine.config.max_len - 1
        self._special: SpecialTokens = special_tokens_of(engine.model, options.prefix_token_id)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._special.end

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without a context is scored after."""
        return self._special.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of `string`; if `add_special_tokens` is None, with what the tokenizer adds, unless `string` has it."""
        return self._special.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, ready for an answer; without `add_generation_prompt` it stops within the last message.

        Raises `InputError` if the model has no chat template, or the template does not take the conversation.
        """
        return self._special.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, None if it is not asked for; `InputError` if the model has none of that name."""
        return self._special.template_source(chat_template) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer and the chat template, for the harness's cache of requests."""
        return self._special.name

    def get_model_info(self) -> dict[str, Any]:
        """Describes the model in results: all that bits depend on besides the requests, and a digest of it."""
        cfg = self.engine.model.cfg
        fingerprint = self.engine.fingerprint()
        return {
            "model_num_parameters": num_params(cfg),
            "model_dtype": cfg.dtype,
            "model_sha": self.engine.model.digest,
            "max_length": self.max_length,
            "model_options": {
                "max_len": self.engine.config.max_len,
                "dtype": cfg.dtype,
                "weights": cfg.weights,
                "cache_dtype": self.engine.schedule.numerics.cache_dtype,
                "deterministic": self.options.deterministic,
                "seed": self.options.seed,
                "max_gen_toks": self.options.max_gen_toks,
                "prefix_token_id": self.prefix_token_id,
            },
            "fingerprint": fingerprint,
            "fingerprint_digest": hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest(),
        }

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-probability, and whether it is what the model would write greedily."""
        answers: dict[int, tuple[float, bool]] = {}

        def keep(place: int, completion: Completion) -> None:
            answers[place] = (math.fsum(completion.logprobs), is_greedy(completion))
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])

        self._score([(context, continuation) for _, context, continuation in requests], keep, disable_tqdm)
        return [answers[place] for place in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts; what is longer than `max_length` is scored in windows, each token once."""
        windows: list[Pair] = []
        owners: list[int] = []  # for each window, the number of its text
        spans: list[range] = []  # for each text, the numbers of its windows
        for number, request in enumerate(requests):
            (text,) = request.args
            cut = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
            own = list(map(make_disjoint_window, cut))
            spans.append(range(len(windows), len(windows) + len(own)))
            windows.extend(own)
            owners.extend([number] * len(own))
        waiting = Counter(owners)
        logprobs: dict[int, Sequence[float]] = {}
        totals = [0.0] * len(requests)

        def keep(place: int, completion: Completion) -> None:
            logprobs[place] = completion.logprobs
            number = owners[place]
            waiting[number] -= 1
            if not waiting[number]:
                totals[number] = math.fsum(value for window in spans[number] for value in logprobs.pop(window))
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, totals[number])

        self._score(windows, keep, disable_tqdm)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated texts, each up to the first of its stop strings.

        A request that comes several times, as `repeats` asks for, has a seed of its own each time.
        """
        seen: Counter[int] = Counter()  # by the object: equal documents of other tasks do not count
        asked = []
        for request in requests:
            context, given = request.args
            # The harness has its own defaults for what is not given, but takes None for a value.
            given = {name: value for name, value in given.items() if value is not None}
            given = normalize_gen_kwargs(given, default_max_gen_toks=self.options.max_gen_toks)
            defaults = {name: getattr(self.options, name) for name in ("seed", "max_gen_toks", "deterministic")}
            sampling = sampling_of(given, context, seen[id(request)], **defaults)
            seen[id(request)] += 1
            asked.append((self._prompt(context, sampling), sampling))
        texts: dict[int, str] = {}

        def keep(place: int, completion: Completion) -> None:
            texts[place] = completion.text
            if not asked[place][1].temperature:  # the harness would return one sample for all
                self.cache_hook.add_partial("generate_until", requests[place].args, completion.text)

        queue = [Request(str(place), prompt, sampling) for place, (prompt, sampling) in enumerate(asked)]
        self._run(queue, keep, "Running generate_until requests", disable_tqdm)
        return [texts[place] for place in range(len(requests))]

    def _prompt(self, context: str, sampling: SamplingParams) -> tuple[int, ...]:
        """The end of `context` that leaves room for the new tokens; the prefix token for an empty one."""
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise InputError(
                f"max_gen_toks is {sampling.max_tokens}, accepted are numbers below max_length ({self.max_length}): lower it "
                "or raise max_len"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return tuple(ids[-room:])

    def _score(self, pairs: Sequence[Pair], keep: Callable[[int, Completion], None], disable_tqdm: bool) -> None:
        """Scores each continuation after its context; contexts that are too long lose their beginning, as with other models."""
        queue = []
        for place, (context, continuation) in enumerate(pairs):
            room = self.max_length + 1 - len(continuation)
            if not context or not continuation or room < 1:
                raise InputError(
                    f"request {place} has {len(context)} tokens of context and {len(continuation)} that follow: accepted are "
                    f"at least one of each, and continuations of up to max_length ({self.max_length})"
                )
            queue.append(Request(str(place), tuple(context[-room:]), SCORING, given_token_ids=tuple(continuation)))
        self._run(queue, keep, "Running loglikelihood requests", disable_tqdm)

    def _run(self, queue: Sequence[Request], keep: Callable[[int, Completion], None], title: str, disable_tqdm: bool) -> None:
        """Runs all requests, and hands each completion with its place in the queue to `keep` as soon as it is there."""
        checked = [check_request(self.engine.model, self.engine.config, request) for request in queue]
        with tqdm(total=len(checked), desc=title, disable=disable_tqdm) as bar:
            for completion in self.engine.run(checked):
                if completion.finish_reason == FAILED:
                    why = completion.error or "the model gave logits that are not finite"
                    raise InputError(f"request {completion.id} failed: {why}")
                keep(int(completion.id), completion)
                bar.update()


def is_greedy(completion: Completion) -> bool:
    """Whether each given token is the canonical pass's likeliest one, of equally likely ones that with the lowest id."""
    return all(token == top[0][0] for token, top in zip(completion.token_ids, completion.top_logprobs, strict=True))
