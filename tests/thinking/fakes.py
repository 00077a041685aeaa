"""Models that think: one whose thoughts are worked out by hand, and small random ones.

`table_thinker`: every matrix of its layers is zero, so all streams are embeddings, which are one-hot. The thinker's head makes
a thought a chain from the last token of its chunk on, and a thought's states are its tokens' embeddings:

    SAYS = {1: 5, 5: 6, 3: 3}, end 0, M = 3, C = 4

    chunk ends in 1   [5 6 0]   states 5 6 0 0        in 3   [3 3 3], cut   states 3 3 0 0        in 2   [0]   states 0
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from detspec.config import ModelConfig, ThinkingConfig
from detspec.model.dense import with_fields
from detspec.model.params import Params, param_shapes
from tests.fakes import RANDOM_CFG, TABLE_CFG, random_model, table_model

SAYS = {1: 5, 5: 6, 3: 3}
TABLE_THINKER_CFG = dataclasses.replace(
    TABLE_CFG, thinking=ThinkingConfig(chunk=4, in_layer=0, out_layer=1, max_thought=3, end_id=0)
)

THINKER_CFG = with_fields(
    RANDOM_CFG,
    num_layers=2,
    d_model=32,
    d_ff=48,
    head_dim=8,
    thinking=ThinkingConfig(chunk=4, in_layer=1, out_layer=2, max_thought=5, end_id=0),
)
ALIBI_THINKER_CFG = with_fields(
    THINKER_CFG,
    dtype="float32",
    num_layers=3,  # one of them after the layer whose output the thinker reads
    position_encoding="alibi",
    sliding_window=9,
    sliding_layers=(True, False, True),
)


def table_thinker() -> Params:
    """See the module."""
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(TABLE_THINKER_CFG))
    backbone = table_model()
    thinking = params["thinking"]
    thinking["thinker"]["layer"] = thinking["compressor"]["layer"] = backbone["layers"][0]
    thinking["thinker"]["final_norm"] = backbone["final_norm"]
    thinking["thinker"]["head"][list(SAYS.values()), list(SAYS)] = 1.0
    return {**backbone, "thinking": jax.tree.map(jnp.asarray, thinking)}


@cache
def random_thinker(cfg: ModelConfig) -> Params:
    """Random weights whose thoughts are of all lengths: a louder ending token ends a third of them at every place."""
    params = random_model(cfg)
    thinker = params["thinking"]["thinker"]
    # Another layer than the backbone's, or the thinker would mostly say what the model would.
    layer = random_model(with_fields(cfg, num_layers=1, sliding_layers=(), thinking=None))["layers"][0]
    head = thinker["head"].at[0].multiply(6.0)
    return {**params, "thinking": {**params["thinking"], "thinker": {**thinker, "layer": layer, "head": head}}}
