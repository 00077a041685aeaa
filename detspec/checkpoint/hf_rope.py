"""Rotary positions in a `config.json`, and back: bases, scalings, and how much of a head is rotated."""

import json
import math
from typing import Any, NamedTuple

from detspec.checkpoint.families.family import Fields, HfConfig, RopeKeys
from detspec.config import RopeScaling, is_count, is_number
from detspec.errors import InputError

LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # name in config.json -> whether such layers slide
ROPE_SETTING_KEYS = ("rope_scaling", "rope_parameters")
# By rope_type: key in config.json -> field of RopeScaling. Each type has `factor` as well.
ORIGINAL_LENGTH = {"original_max_position_embeddings": "original_max_position"}
ROPE_SCALING_FIELDS: dict[str, dict[str, str]] = {
    "linear": {},
    "llama3": {**ORIGINAL_LENGTH, **{name: name for name in ("low_freq_factor", "high_freq_factor")}},
    "longrope": {
        **ORIGINAL_LENGTH,
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        "attention_factor": "attention_factor",
    },
    "yarn": {**ORIGINAL_LENGTH, **{name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")}},
}
OLD_KINDS = {"su": "longrope"}  # earlier names of rope types
YARN_MSCALES = ("mscale", "mscale_all_dim")
BESIDE_ALPHA = {"factor", "beta_fast", "beta_slow", *YARN_MSCALES}  # keys that say nothing where there is an `alpha`


class Setting(NamedTuple):
    """A JSON object of rotary positions, taken apart."""

    base: Any  # `rope_theta`, or None
    share: Any  # `partial_rotary_factor`, or None
    rest: dict[str, Any]  # the type, and its keys


def rope_keys(rope: RopeKeys | None) -> set[str]:
    """The config keys that `read_rope` reads."""
    if rope is None:
        return set()
    named = {rope.theta_key, rope.sliding_theta_key, rope.size_key, rope.share_key if rope.share is not None else None}
    return {*ROPE_SETTING_KEYS, *(key for key in named if key is not None)}


def read_rope(hf_config: HfConfig, rope: RopeKeys, head_dim: Any, problems: list[str]) -> Fields:
    """Rotary bases and scaling, from `rope_theta` and `rope_scaling`, or (transformers 5) from `rope_parameters`."""
    settings = [hf_config[key] for key in ("rope_parameters", "rope_scaling") if hf_config.get(key) is not None]
    settings = settings or [setting for setting in (rope.default,) if setting is not None]
    if not all(isinstance(setting, dict) for setting in settings):
        problems.append(f"config.json: rope settings {json.dumps(settings)} are not JSON objects")
        return {}
    nested = [setting for setting in settings if set(setting) & set(LAYER_TYPES)]
    flat = [setting for setting in settings if setting not in nested]
    by_type = [setting[kind] for setting in nested for kind in set(setting) & set(LAYER_TYPES)]
    if not all(setting is None or isinstance(setting, dict) for setting in by_type):
        problems.append(f"config.json: rope settings {json.dumps(nested)} hold a value that is not a JSON object")
        return {}
    full = [setting["full_attention"] for setting in nested if setting.get("full_attention") is not None]
    sliding = [setting["sliding_attention"] for setting in nested if setting.get("sliding_attention") is not None]
    theta, scaling = read_rope_setting(hf_config, rope, head_dim, [*flat, *full], problems)
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    if rope.share is not None and is_count(head_dim):
        fields["rotary_dim"] = read_share(hf_config, rope, head_dim, [*flat, *full], problems)
    if rope.sliding_theta is not None:
        local = RopeKeys(theta=rope.sliding_theta, theta_key=rope.sliding_theta_key or "")
        base, other = read_rope_setting(hf_config, local, head_dim, sliding, problems)
        fields["sliding_rope_theta"] = base
        if other is not None:
            problems.append(f"config.json: rope scaling of sliding layers is not supported, got {json.dumps(sliding)}")
    elif sliding:
        problems.append(f"config.json: this family takes no rope settings by layer type, got {json.dumps(nested)}")
    return fields


def read_share(
    hf_config: HfConfig, rope: RopeKeys, head_dim: int, settings: list[dict[str, Any]], problems: list[str]
) -> int | None:
    """How many places of a head are rotated; None for all of them."""
    given = [hf_config.get(rope.share_key), *(taken_apart(setting).share for setting in settings)]
    for size in (hf_config[key] for key in (rope.size_key,) if key is not None and key in hf_config):
        given.append(size / head_dim if is_number(size) else size)
    shares = [share for share in given if share is not None]
    if any(not is_number(share) or not 0 < share <= 1 or share != shares[0] for share in shares):
        problems.append(f"config.json: {rope.share_key} must be one number in 0 .. 1, got {json.dumps(shares)}")
        return None
    rotated = int(head_dim * (shares[0] if shares else rope.share or 1.0))
    return None if rotated == head_dim else rotated


def read_rope_setting(
    hf_config: HfConfig, rope: RopeKeys, head_dim: Any, settings: list[dict[str, Any]], problems: list[str]
) -> tuple[Any, RopeScaling | None]:
    """Rotary base and scaling of one kind of layers; where the config gives them several times, they must agree."""
    bases = [hf_config[rope.theta_key]] if hf_config.get(rope.theta_key) is not None else []
    scalings = []
    alphas = []
    for setting in map(taken_apart, settings):
        bases += [setting.base] if setting.base is not None else []
        if rope.share is None and setting.share not in (None, 1.0):
            problems.append(
                f'config.json: rope setting {{"partial_rotary_factor": {json.dumps(setting.share)}}} is not supported: this '
                "family rotates all of a head"
            )
        rest = {key: value for key, value in setting.rest.items() if value is not None}
        if rope.alpha and {"alpha", "factor"} <= rest.keys() and kind_of(rest) == "dynamic":
            alphas.append(rest["alpha"])
            rest = {key: value for key, value in rest.items() if key not in {"type", "rope_type", "alpha", *BESIDE_ALPHA}}
        scalings.append(read_rope_scaling(rest, hf_config, rope, problems))
    if any(base != bases[0] for base in bases):
        problems.append(f"config.json: {rope.theta_key} is given as {' and '.join(str(base) for base in bases)}")
    if (
        any(scaling != scalings[0] for scaling in scalings)
        or len(alphas) not in (0, len(settings))
        or alphas[:1] != alphas[-1:]
    ):
        problems.append(f"config.json: rope settings {json.dumps(settings)} contradict each other")
    theta = bases[0] if bases else rope.theta
    for key, value in ((rope.theta_key, theta), ("alpha", alphas[0] if alphas else 1.0)):
        if not is_number(value) or not value > 0:
            problems.append(f"config.json: {key} must be a positive number, got {json.dumps(value)}")
            return rope.theta, None
    if alphas and is_number(head_dim) and head_dim > 2:
        theta = theta * alphas[0] ** (head_dim / (head_dim - 2))
    return float(theta), scalings[0] if scalings else None


def taken_apart(setting: dict[str, Any]) -> Setting:
    """A rope setting's base, its rotated part, and what is left."""
    rest = dict(setting)
    return Setting(rest.pop("rope_theta", None), rest.pop("partial_rotary_factor", None), rest)


def kind_of(setting: dict[str, Any]) -> str | None:
    """The rope type that a setting names, under either of two keys; None if they differ."""
    kinds = {str(setting[key]) for key in ("rope_type", "type") if key in setting} or {"default"}
    kind = kinds.pop() if len(kinds) == 1 else None
    return OLD_KINDS.get(str(kind), kind)


def read_rope_scaling(setting: dict[str, Any], hf_config: HfConfig, rope: RopeKeys, problems: list[str]) -> RopeScaling | None:
    """The scaling that one rope setting asks for; `setting` comes without its base."""
    rest = {key: value for key, value in setting.items() if key not in ("rope_type", "type")}
    kind = kind_of(setting)
    if kind != "default" and kind not in rope.kinds:
        accepted = ", ".join(["default", *rope.kinds])
        problems.append(f"config.json: rope setting {json.dumps(setting)} is not supported; accepted rope types: {accepted}")
        return None
    if kind == "default" and not rest:
        return None
    names = ROPE_SCALING_FIELDS.get(str(kind), {})
    mscales = [rest.pop(key) for key in YARN_MSCALES if key in rest] if kind == "yarn" else []
    if not all(is_number(mscale) and mscale >= 0 for mscale in mscales):
        problems.append(
            f"config.json: rope setting {json.dumps(setting)}: {' and '.join(YARN_MSCALES)} must be numbers of at least 0"
        )
        return None
    if kind == "longrope":
        rest = with_original_length(rest, hf_config)
    if unknown := [key for key in rest if key not in names and (key != "factor" or kind == "default")]:
        problems.append(f"config.json: rope setting {json.dumps(setting)} has unsupported keys {', '.join(unknown)}")
        return None
    needed = [
        key
        for key in ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
        if key in ("factor", *names)
    ]
    if missing := [key for key in needed if key not in rest]:
        problems.append(f"config.json: rope setting {json.dumps(setting)} lacks {', '.join(missing)}")
        return None
    fields: Fields = {names.get(key, key): tuple(value) if isinstance(value, list) else value for key, value in rest.items()}
    if "original_max_position_embeddings" in names:
        fields.setdefault("original_max_position", hf_config.get("max_position_embeddings"))
    if kind == "yarn" and is_number(fields.get("factor")):
        fields.setdefault("attention_factor", yarn_attention_factor(fields["factor"], mscales))
    try:
        return RopeScaling(kind=str(kind), **fields)
    except (InputError, TypeError) as error:
        problems.append(f"config.json: rope setting {json.dumps(setting)}: {error}")
        return None


def with_original_length(setting: dict[str, Any], hf_config: HfConfig) -> dict[str, Any]:
    """A setting of "longrope" with all that transformers makes of it."""
    rest = dict(setting)
    original: Any = hf_config.get("original_max_position_embeddings")
    longest: Any = hf_config.get("max_position_embeddings")
    if not (is_count(original) and is_count(longest) and original > 1):
        return rest
    factor: Any = rest.get("factor", longest / original)
    if is_number(factor) and factor > 1:
        rest.setdefault("attention_factor", math.sqrt(1 + math.log(factor) / math.log(original)))
    return {**rest, "factor": max(1.0, factor) if is_number(factor) else factor, "original_max_position_embeddings": original}


def yarn_attention_factor(factor: float, mscales: list[float]) -> float:
    """`0.1 ln(factor) + 1`, or a quotient of two such terms with the weights `mscales`, as in DeepSeek's models."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return mscale(mscales[0]) / mscale(mscales[1]) if len(mscales) == 2 and all(mscales) else mscale(1.0)


def describe_rope(rope: RopeKeys, flat: Fields) -> HfConfig:
    """The config keys of rotary positions as transformers 5 reads them, and the base as transformers 4 does."""
    setting = rope_setting(flat)
    if rope.share is not None:
        setting["partial_rotary_factor"] = (flat["rotary_dim"] or flat["head_dim"]) / flat["head_dim"]
    if flat["sliding_rope_theta"] is not None:
        local = {"rope_theta": flat["sliding_rope_theta"], "rope_type": "default"}
        return {rope.theta_key: flat["rope_theta"], "rope_parameters": {"full_attention": setting, "sliding_attention": local}}
    return {rope.theta_key: flat["rope_theta"], "rope_parameters": setting}


def describe_old_rope(rope: RopeKeys, flat: Fields) -> HfConfig:
    """The other config keys of rotary positions that transformers 4 reads."""
    described: HfConfig = {}
    if rope.share is not None:
        size = flat["rotary_dim"] or flat["head_dim"]
        described |= {rope.share_key: size / flat["head_dim"], **({} if rope.size_key is None else {rope.size_key: size})}
    if flat["sliding_rope_theta"] is not None:
        described |= {} if rope.sliding_theta_key is None else {rope.sliding_theta_key: flat["sliding_rope_theta"]}
    elif flat["rope_scaling"] is not None:
        described["rope_scaling"] = {key: value for key, value in rope_setting(flat).items() if key != "rope_theta"}
    return described


def rope_setting(flat: Fields) -> dict[str, Any]:
    """Base, type and scaling of a model, as a rope setting."""
    setting: dict[str, Any] = {"rope_theta": flat["rope_theta"], "rope_type": "default"}
    scaling = flat["rope_scaling"]
    if scaling is not None:
        names = ROPE_SCALING_FIELDS[scaling.kind]
        scaled = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
        setting |= {"rope_type": scaling.kind, "factor": scaling.factor, **scaled}
        if scaling.kind == "longrope":  # transformers asks for both
            long = scaling.long_factors or scaling.short_factors
            setting |= {"short_factor": list(scaling.short_factors), "long_factor": list(long)}
    return setting
