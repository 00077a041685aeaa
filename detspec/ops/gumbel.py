"""Gumbel noise by the counter-based generator Threefry-2x32 of 20 rounds (Salmon et al., SC 2011), in one elementwise kernel.

The bits are those of `jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), [V])` with jax's defaults. They
depend on no setting of jax. `jax.random` takes 17 kernels on a CPU, two of them loops, which take longer to compile and to run.
"""

import jax
import jax.numpy as jnp

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA


def gumbel(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise `[R, V]` float32 for int32 `seed [R]` and `position [R]`; a row depends on its own two alone."""
    zero = jnp.zeros((), jnp.uint32)
    key = threefry2x32((zero, seed.astype(jnp.uint32)), (zero, position.astype(jnp.uint32)))
    count = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :]
    bits = jnp.bitwise_xor(*threefry2x32((key[0][:, None], key[1][:, None]), (zero, count)))
    one_to_two = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    smallest = jnp.finfo(jnp.float32).tiny
    uniform = jnp.maximum(one_to_two - 1, smallest)  # the logarithm of 0 is not finite
    return -jnp.log(-jnp.log(uniform))


def threefry2x32(key: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Encrypts `block` by `key`, each two arrays uint32 whose shapes broadcast to one."""
    keys = *key, key[0] ^ key[1] ^ jnp.uint32(PARITY)
    x = block[0] + keys[0]
    y = block[1] + keys[1]
    for group in range(1, 6):
        for rotation in ROTATIONS[(group - 1) % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + keys[group % 3]
        y = y + keys[(group + 1) % 3] + jnp.uint32(group)
    return x, y
