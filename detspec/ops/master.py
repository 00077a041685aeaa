"""Weights of training: operations take them rounded to the model's dtype, their derivatives come in their own, unrounded."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from detspec.struct import Struct


class Master(Struct):
    """A weight of training."""

    rounded: jax.Array  # what is multiplied with, in the model's dtype
    full: jax.Array  # what gets the derivative, in its own dtype; the same array where that is the model's

    @classmethod
    def of(cls, full: jax.Array, dtype: DTypeLike) -> "Master":
        """The weight `full`, rounded to `dtype`."""
        return cls(jax.lax.stop_gradient(full.astype(dtype)), full)

    @property
    def like(self) -> jax.Array:
        """An array without elements, in the dtype of the derivative."""
        return jnp.zeros(0, self.full.dtype)

    @staticmethod
    def cotangent(rounded: jax.Array, of_full: jax.Array) -> "Master":
        """The cotangent of a master: all of it belongs to the full weight."""
        return Master(jnp.zeros_like(rounded), of_full)
