"""Dense decoders by flat fields: the way in which published shapes are written, and the JSON of such a model.

    dense_config(vocab_size=32000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336)

Layers are alike but for three things, each of which makes a kind of its own: those that slide have a window, and may have a
rotary base of their own; some do not rotate; some have experts in place of the MLP. The first kind has full attention.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from detspec.config import MAX_LAYERS, ModelConfig, Rope, RopeScaling, ThinkingConfig, is_count
from detspec.errors import InputError
from detspec.model.attention import Attention
from detspec.model.experts import MixtureOfExperts
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
}
# Fields that JSON has only where they differ from these: so the digests of models stay what they were before there were any.
LATER: dict[str, Any] = {
    "weights": None,
    "norm": "rms",
    "norm_bias": False,
    "embed_scale": None,
    "logit_divisor": None,
    "learned_positions": False,
    "qk_norm_of": "head",
    "score_scale": None,
    "sinks": False,
    "rotary_dim": None,  # places of a head that are rotated, where not all are
    "rope_interleaved": False,
    "unrotated_layers": (),  # for each layer, whether it rotates nothing; () if all rotate
    "pre_norms": True,
    "parallel": False,
    "residual_scale": None,
    "gated": True,
    "mlp_bias": False,
    "experts": None,  # a `MixtureOfExperts` in place of the MLP
    "dense_layers": (),  # for each layer, whether it keeps the MLP; () if none does
}
UNSAID = (*LATER, "size", "interleaved", "bias", "clamp")  # fields of dataclasses that are left out likewise
UNSAID += ("float32_router", "short_factors", "long_factors", "is_long")
# Fields of `ModelConfig`, of `Attention` and of `Layer` by the same names.
OF_MODEL: tuple[str, ...] = ("vocab_size", "d_model", "norm_eps", "tie_embeddings", "max_position", "dtype", "norm_plus_one")
OF_MODEL += ("scale_embeddings", "logit_softcap", "thinking", "weights", "norm", "norm_bias", "embed_scale", "logit_divisor")
OF_MODEL += ("learned_positions",)
OF_ATTENTION: tuple[str, ...] = ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm", "score_dim")
OF_ATTENTION += ("qk_norm_of", "score_scale", "sinks")
OF_LAYER = ("post_norms", "pre_norms", "parallel", "residual_scale")


def dense_config(*sizes: int, **fields: Any) -> ModelConfig:
    """The config of a dense decoder.

    Args:
        sizes: the first of `SIZES`, in their order.
        fields: the other sizes, and whatever differs from `DEFAULTS` and `LATER`; see `ModelConfig`, `Attention`, `Layer` and
            `GatedMLP`. Some have other names there: `position_encoding` is `Attention.positions`, `attn_softcap` is
            `Attention.softcap`, `rotary_dim` is `Rope.size`.

    Raises `TypeError` for a field that there is not, `InputError` for values that do not fit.
    """
    if len(sizes) > len(SIZES):
        raise TypeError(f"dense_config takes {len(SIZES)} sizes by position, {', '.join(SIZES)}, got {len(sizes)} values")
    by_position = dict(zip(SIZES, sizes, strict=False))
    if twice := [name for name in by_position if name in fields]:
        raise TypeError(f"dense_config got {twice[0]} by position and by name")
    given = {**by_position, **fields}
    if unknown := [name for name in given if name not in (*SIZES, *DEFAULTS, *LATER)]:
        raise TypeError(f"dense_config has no field {unknown[0]!r}; it has {', '.join((*SIZES, *DEFAULTS, *LATER))}")
    if missing := [name for name in SIZES if name not in given]:
        raise TypeError(f"dense_config lacks the size {missing[0]!r}")
    values = {**DEFAULTS, **LATER, **given}
    num_layers = values["num_layers"]
    if not is_count(num_layers):
        raise InputError(f"num_layers must be a positive integer, at most 2**31-1, got {num_layers!r}")
    if num_layers > MAX_LAYERS:
        raise InputError(f"num_layers must be at most {MAX_LAYERS}, got {num_layers}")
    slides, unrotated, dense = (_by_layer(name, values) for name in ("sliding_layers", "unrotated_layers", "dense_layers"))
    experts = values["experts"]
    sparse = tuple(experts is not None and not is_dense for is_dense in dense)
    window = values["sliding_window"]
    if (any(slides) or window is not None) and not is_count(window):
        raise InputError(f"sliding layers need a sliding_window of at least 1, got {window!r}")
    full = Attention(
        **{name: values[name] for name in OF_ATTENTION},
        positions=values["position_encoding"],
        rope=Rope(
            values["rope_theta"], values["rope_scaling"], size=values["rotary_dim"], interleaved=values["rope_interleaved"]
        ),
        softcap=values["attn_softcap"],
    )
    own_theta = values["sliding_rope_theta"]
    local = full.rope if own_theta is None else dataclasses.replace(full.rope, theta=own_theta, scaling=None, is_local=True)
    sliding = dataclasses.replace(full, window=window, rope=local)
    ff = GatedMLP(values["d_ff"], values["activation"], values["mlp_bias"], values["gated"])

    def kind(slides: bool, unrotated: bool, sparse: bool) -> Layer:
        mixer = sliding if slides else full
        mixer = dataclasses.replace(mixer, positions="none") if unrotated else mixer
        return Layer(mixer, experts if sparse else ff, **{name: values[name] for name in OF_LAYER})

    traits = list(zip(slides, unrotated, sparse, strict=True))
    # A model that slides nowhere, but has a window, keeps a kind for that.
    alone = [(False,) * 3, (True, False, False)][: 1 + (window is not None or own_theta is not None)]
    of_kinds = list(dict.fromkeys(traits if any(unrotated) or any(sparse) else [*alone, *traits]))
    return ModelConfig(
        **{name: values[name] for name in OF_MODEL},
        kinds=tuple(kind(*trait) for trait in of_kinds),
        pattern=tuple(of_kinds.index(trait) for trait in traits),
    )


def _by_layer(name: str, values: dict[str, Any]) -> tuple[bool, ...]:
    """Reads a field that says True or False of each layer; an empty one says False of all."""
    given = values[name]
    num_layers = values["num_layers"]
    if not isinstance(given, list | tuple) or not all(isinstance(flag, bool) for flag in given):
        raise InputError(f"{name} must be True or False for each layer, got {given!r}")
    if given and len(given) != num_layers:
        raise InputError(f"{name} must name each of the {num_layers} layers, got {len(given)}")
    return tuple(given) or (False,) * num_layers


def flat_fields(cfg: ModelConfig) -> dict[str, Any] | None:
    """The fields that `dense_config` makes `cfg` of, in their order; None if it has layers of other kinds."""
    mixers = [kind.mixer for kind in cfg.kinds if type(kind.mixer) is Attention]
    ffs = [kind.ff for kind in cfg.kinds]
    if len(mixers) < len(cfg.kinds) or not all(type(ff) in KINDS.values() for ff in ffs):
        return None
    full = next((mixer for mixer in mixers if mixer.window is None and not mixer.rope.is_local), mixers[0])
    sliding = next((mixer for mixer in mixers if mixer.window is not None or mixer.rope.is_local), full)
    experts = next((ff for ff in ffs if isinstance(ff, MixtureOfExperts)), None)
    mlp = next((ff for ff in ffs if isinstance(ff, GatedMLP)), GatedMLP(ffs[0].d_ff, ffs[0].activation))
    rotates = [mixer.positions for mixer in mixers if mixer.positions != "none"]

    def of_layers(of_kinds: Sequence[bool]) -> tuple[bool, ...]:
        flags = tuple(of_kinds[kind] for kind in cfg.pattern)
        return flags if any(flags) else ()

    values = {
        **{name: getattr(cfg, name) for name in OF_MODEL},
        **{name: getattr(full, name) for name in OF_ATTENTION},
        **{name: getattr(cfg.kinds[0], name) for name in OF_LAYER},
        "num_layers": cfg.num_layers,
        "d_ff": mlp.d_ff,
        "activation": mlp.activation,
        "rope_theta": full.rope.theta,
        "rope_scaling": full.rope.scaling,
        "rotary_dim": full.rope.size,
        "rope_interleaved": full.rope.interleaved,
        "sliding_window": sliding.window,
        "sliding_layers": of_layers([mixer.window is not None or mixer.rope.is_local for mixer in mixers]),
        "sliding_rope_theta": sliding.rope.theta if sliding.rope.is_local else None,
        "attn_softcap": full.softcap,
        "position_encoding": rotates[0] if rotates else "none",
        "unrotated_layers": of_layers([bool(rotates) and mixer.positions == "none" for mixer in mixers]),
        "gated": mlp.gated,
        "mlp_bias": mlp.bias,
        "experts": experts,
        "dense_layers": () if experts is None else of_layers([ff != experts for ff in ffs]),
    }
    return {name: values[name] for name in (*SIZES, *DEFAULTS, *LATER)} if _makes(cfg, values) else None


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


def for_long_texts(cfg: ModelConfig) -> ModelConfig:
    """A model of "longrope" whose texts may be as long as its extension says, and all have the factors of long ones.

    Raises `InputError` for other models, whose rotations are the same for texts of any length.
    """
    scaling = _scaling(cfg)
    if scaling is None or not scaling.long_factors:
        raise InputError(
            "long_texts is for models whose rotations have other factors for long texts (Phi-3's 'longrope'); this one's texts "
            f"may have up to {cfg.max_position} tokens, leave it out"
        )
    longest = round(scaling.original_max_position * scaling.factor)
    return with_fields(cfg, rope_scaling=dataclasses.replace(scaling, is_long=True), max_position=longest)


def has_longer_texts(cfg: ModelConfig) -> bool:
    """Whether `for_long_texts` would make its texts longer."""
    scaling = _scaling(cfg)
    return scaling is not None and bool(scaling.long_factors) and not scaling.is_long


def _scaling(cfg: ModelConfig) -> RopeScaling | None:
    return (flat_fields(cfg) or {}).get("rope_scaling")


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Attention, GatedMLP, MixtureOfExperts)}  # by the name in JSON


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
        return _stated(cfg)
    return {name: _to_json(value) for name, value in fields.items() if name not in LATER or value != LATER[name]}


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
                Layer(**{**layer, **{part: _part_of(layer[part], known) for part in ("mixer", "ff")}})
                for layer in values["kinds"]
            )
        except KeyError as error:
            raise TypeError(f"a kind of layers lacks {error}") from error
        return ModelConfig(**{**values, "kinds": layers, "pattern": tuple(values["pattern"])})
    values["rope_scaling"] = _scaling_of(values.get("rope_scaling"))
    values["sliding_layers"] = tuple(values.get("sliding_layers", ()))
    if values.get("experts") is not None:
        values["experts"] = MixtureOfExperts(**values["experts"])
    return dense_config(**values)


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return _stated(value) if dataclasses.is_dataclass(value) else value


def _stated(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, but for later ones of this package with their default; parts of layers name their kind."""
    ours = [base for base in type(value).__mro__ if base.__module__.startswith("detspec.") and dataclasses.is_dataclass(base)]
    unsaid = {field.name for base in ours for field in dataclasses.fields(base)} & {*UNSAID}
    fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    stated = {name: _to_json(found) for name, (found, default) in fields.items() if name not in unsaid or found != default}
    for name in ("mixer", "ff") if isinstance(value, Layer) else ():
        stated[name] = {"kind": type(getattr(value, name)).__name__, **stated[name]}
    return stated


def _part_of(values: dict[str, Any], known: dict[str, Any]) -> Any:
    fields = dict(values)
    name = fields.pop("kind")
    if name not in known:
        raise InputError(
            f"this version has no layers of kind {name!r}, only {', '.join(known)}: if its class is yours, give it, as in "
            f"detspec.load(path, kinds=({name},))"
        )
    if "rope" in fields:
        fields["rope"] = Rope(**{**fields["rope"], "scaling": _scaling_of(fields["rope"]["scaling"])})
    return known[name](**fields)


def _scaling_of(values: dict[str, Any] | None) -> RopeScaling | None:
    if values is None:
        return None
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return RopeScaling(**fields)
