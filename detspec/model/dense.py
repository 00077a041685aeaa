"""Dense decoders by flat fields: the way in which published shapes are written, and the JSON of such a model.

    dense_config(vocab_size=32000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336)

All layers have the same attention and the same gated MLP. Those that slide have a window, and may have a rotary base of their
own: then there are two kinds of layers, the first with full attention.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from detspec.config import MAX_LAYERS, ModelConfig, Rope, RopeScaling, ThinkingConfig, is_count
from detspec.errors import InputError
from detspec.model.attention import Attention
from detspec.model.layers import Layer
from detspec.model.mlp import GatedMLP

# Flat fields of a model of one kind, in the order of its JSON; sizes without a default come first.
SIZES = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff")
DEFAULTS: dict[str, Any] = {
    "rope_theta": 10000.0,  # base of the rotary frequencies
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "max_position": 2048,
    "dtype": "bfloat16",
    "rope_scaling": None,  # a `RopeScaling`
    "sliding_window": None,  # positions that sliding layers attend to, their own included
    "sliding_layers": (),  # for each layer, whether it slides; () if none does
    "sliding_rope_theta": None,  # unscaled rotary base of sliding layers, where it is another (Gemma 3)
    "qkv_bias": False,
    "o_bias": False,
    "qk_norm": False,
    "post_norms": False,
    "norm_plus_one": False,
    "scale_embeddings": False,
    "activation": "silu",
    "score_dim": None,
    "attn_softcap": None,
    "logit_softcap": None,
    "position_encoding": "rope",
    "thinking": None,
    "weights": None,
}
# Fields of `ModelConfig` and of `Attention` by the same names.
OF_MODEL: tuple[str, ...] = ("vocab_size", "d_model", "norm_eps", "tie_embeddings", "max_position", "dtype", "norm_plus_one")
OF_MODEL += ("scale_embeddings", "logit_softcap", "thinking", "weights")
OF_ATTENTION = ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm", "score_dim")


def dense_config(*sizes: int, **fields: Any) -> ModelConfig:
    """The config of a dense decoder.

    Args:
        sizes: the first of `SIZES`, in their order.
        fields: the other sizes, and whatever differs from `DEFAULTS`; see `ModelConfig`, `Attention` and `GatedMLP`. Two have
            other names there: `position_encoding` is `Attention.positions`, `attn_softcap` is `Attention.softcap`.

    Raises `TypeError` for a field that there is not, `InputError` for values that do not fit.
    """
    if len(sizes) > len(SIZES):
        raise TypeError(f"dense_config takes {len(SIZES)} sizes by position, {', '.join(SIZES)}, got {len(sizes)} values")
    by_position = dict(zip(SIZES, sizes, strict=False))
    if twice := [name for name in by_position if name in fields]:
        raise TypeError(f"dense_config got {twice[0]} by position and by name")
    given = {**by_position, **fields}
    if unknown := [name for name in given if name not in (*SIZES, *DEFAULTS)]:
        raise TypeError(f"dense_config has no field {unknown[0]!r}; it has {', '.join((*SIZES, *DEFAULTS))}")
    if missing := [name for name in SIZES if name not in given]:
        raise TypeError(f"dense_config lacks the size {missing[0]!r}")
    values = {**DEFAULTS, **given}
    num_layers = values["num_layers"]
    slides = values["sliding_layers"]
    if not is_count(num_layers):
        raise InputError(f"num_layers must be a positive integer, at most 2**31-1, got {num_layers!r}")
    if num_layers > MAX_LAYERS:
        raise InputError(f"num_layers must be at most {MAX_LAYERS}, got {num_layers}")
    if not isinstance(slides, list | tuple) or not all(isinstance(slide, bool) for slide in slides):
        raise InputError(f"sliding_layers must be True or False for each layer, got {slides!r}")
    if slides and len(slides) != num_layers:
        raise InputError(f"sliding_layers must name each of the {num_layers} layers, got {len(slides)}")
    window = values["sliding_window"]
    if (any(slides) or window is not None) and not is_count(window):
        raise InputError(f"sliding layers need a sliding_window of at least 1, got {window!r}")
    full = Attention(
        **{name: values[name] for name in OF_ATTENTION},
        positions=values["position_encoding"],
        rope=Rope(values["rope_theta"], values["rope_scaling"]),
        softcap=values["attn_softcap"],
    )
    mixers = [full]
    own_theta = values["sliding_rope_theta"]
    if window is not None or own_theta is not None:
        mixers.append(
            dataclasses.replace(full, window=window, rope=full.rope if own_theta is None else Rope(own_theta, is_local=True))
        )
    ff = GatedMLP(values["d_ff"], values["activation"])
    return ModelConfig(
        **{name: values[name] for name in OF_MODEL},
        kinds=tuple(Layer(mixer, ff, values["post_norms"]) for mixer in mixers),
        pattern=tuple(map(int, slides)) or (0,) * num_layers,
    )


def flat_fields(cfg: ModelConfig) -> dict[str, Any] | None:
    """The fields that `dense_config` makes `cfg` of, in their order; None if it has layers of other kinds."""
    first = cfg.kinds[0]
    last = cfg.kinds[-1]
    if not (isinstance(first.mixer, Attention) and isinstance(last.mixer, Attention) and isinstance(first.ff, GatedMLP)):
        return None
    values = {
        **{name: getattr(cfg, name) for name in OF_MODEL},
        **{name: getattr(first.mixer, name) for name in OF_ATTENTION},
        "num_layers": cfg.num_layers,
        "d_ff": first.ff.d_ff,
        "activation": first.ff.activation,
        "rope_theta": first.mixer.rope.theta,
        "rope_scaling": first.mixer.rope.scaling,
        "sliding_window": last.mixer.window,
        "sliding_layers": tuple(map(bool, cfg.pattern)) if any(cfg.pattern) else (),
        "sliding_rope_theta": last.mixer.rope.theta if last.mixer.rope.is_local else None,
        "post_norms": first.post_norms,
        "attn_softcap": first.mixer.softcap,
        "position_encoding": first.mixer.positions,
    }
    return {name: values[name] for name in (*SIZES, *DEFAULTS)} if _makes(cfg, values) else None


def _makes(cfg: ModelConfig, values: dict[str, Any]) -> bool:
    try:
        return dense_config(**values) == cfg
    except InputError:  # its kinds are none that a dense model has
        return False


def with_fields(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """A dense model with some flat fields changed; `InputError` if `cfg` has layers of other kinds."""
    fields = flat_fields(cfg)
    if fields is None:
        raise InputError(f"only a dense model has flat fields, got {cfg}: change its kinds and pattern by dataclasses.replace")
    return dense_config(**{**fields, **changes})


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Attention, GatedMLP)}  # by the name that JSON has


def own_kinds(cfg: ModelConfig) -> tuple[type[Any], ...]:
    """The classes of mixers and feed-forward parts of `cfg` that are not this package's."""
    parts = (part for kind in cfg.kinds for part in (kind.mixer, kind.ff))
    return tuple(dict.fromkeys(type(part) for part in parts if type(part) not in KINDS.values()))


def config_to_json(cfg: ModelConfig) -> dict[str, Any]:
    """A config as JSON has it: flat fields of a dense model, else its kinds and the pattern; `weights` only if they are set.

    So the digests of models stay what they were before there were kinds of layers, or rounded weights.
    """
    fields = flat_fields(cfg)
    if fields is None:
        fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        fields["kinds"] = [_kind_to_json(kind) for kind in cfg.kinds]
    return {name: _to_json(value) for name, value in fields.items() if name != "weights" or value is not None}


def config_from_json(values: dict[str, Any], *, kinds: Sequence[type[Any]] = ()) -> ModelConfig:
    """The config that `config_to_json` made `values` of; `kinds` are classes of layers besides this package's.

    Raises `TypeError` for a field that there is not, and `InputError` for a kind of layers that is not known.
    """
    thinking = values.get("thinking")
    values = {**values, "thinking": None if thinking is None else ThinkingConfig(**thinking)}
    if "kinds" in values:
        known = {**{kind.__name__: kind for kind in kinds}, **KINDS}
        try:
            layers = tuple(
                Layer(_part_of(layer["mixer"], known), _part_of(layer["ff"], known), layer["post_norms"])
                for layer in values["kinds"]
            )
        except KeyError as error:
            raise TypeError(f"a kind of layers lacks {error}") from error
        return ModelConfig(**{**values, "kinds": layers, "pattern": tuple(values["pattern"])})
    scaling = values.get("rope_scaling")
    values["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
    values["sliding_layers"] = tuple(values.get("sliding_layers", ()))
    return dense_config(**values)


def _to_json(value: Any) -> Any:
    if isinstance(value, RopeScaling | ThinkingConfig):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _kind_to_json(kind: Layer) -> dict[str, Any]:
    parts: dict[str, Any] = {"mixer": kind.mixer, "ff": kind.ff}
    named = {name: {"kind": type(part).__name__, **dataclasses.asdict(part)} for name, part in parts.items()}
    return {**named, "post_norms": kind.post_norms}


def _part_of(values: dict[str, Any], known: dict[str, Any]) -> Any:
    fields = dict(values)
    name = fields.pop("kind")
    if name not in known:
        raise InputError(
            f"this version has no layers of kind {name!r}, only {', '.join(known)}: if its class is yours, give it, as in "
            f"detspec.load(path, kinds=({name},))"
        )
    if "rope" in fields:
        scaling = fields["rope"]["scaling"]
        fields["rope"] = Rope(**{**fields["rope"], "scaling": None if scaling is None else RopeScaling(**scaling)})
    return known[name](**fields)
