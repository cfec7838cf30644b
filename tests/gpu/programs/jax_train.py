"""Jitted updates in JAX: a training, repeatable to the bit, and an array of which every word is checked."""

from __future__ import annotations

import os
from functools import partial

# Memory as it is needed; no choice of kernels by how fast they ran just now; no need of ptxas.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_gpu_deterministic_ops=true",
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_unsafe_fallback_to_driver_on_ptxas_not_found=true",
    ]
)

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import ticking

WIDTH, BATCH = 1024, 256
COLUMNS = 1 << 20
FACTOR, ADDEND = 1664525, 1013904223  # Numerical Recipes' generator, modulo 2**32
WORD = 1 << 32

Parameters = dict[str, jax.Array]


def first(rows: int) -> jax.Array:
    """The words at tick 0: a hash of the index."""
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, COLUMNS), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, COLUMNS), 1)
    word = (row * jnp.uint32(COLUMNS) + column) * jnp.uint32(0x9E3779B1)
    word = (word ^ (word >> 15)) * jnp.uint32(0x85EBCA77)
    return word ^ (word >> 13)


@partial(jax.jit, donate_argnums=0)
def update(words: jax.Array) -> jax.Array:
    return words * jnp.uint32(FACTOR) + jnp.uint32(ADDEND)


@partial(jax.jit)
def right(words: jax.Array, factor: jax.Array, addend: jax.Array) -> jax.Array:
    return jnp.all(words == first(words.shape[0]) * factor + addend)


def loss(parameters: Parameters, given: jax.Array) -> jax.Array:
    inner = jnp.maximum(given @ parameters["one"], 0)
    return jnp.mean((inner @ parameters["two"] - given[:, ::-1]) ** 2)


@partial(jax.jit, donate_argnums=(0, 1))
def train(
    parameters: Parameters, momentum: Parameters, key: jax.Array, tick: jax.Array
) -> tuple[Parameters, Parameters, jax.Array, jax.Array]:
    """One step of gradient descent, with its loss and the sum of all parameters' bits."""
    given = jax.random.uniform(jax.random.fold_in(key, tick), (BATCH, WIDTH), minval=-1)
    value, slope = jax.value_and_grad(loss)(parameters, given)
    momentum = jax.tree.map(lambda m, s: 0.9 * m + s, momentum, slope)
    parameters = jax.tree.map(lambda p, m: p - 0.1 * m, parameters, momentum)
    bits = [jnp.sum(jax.lax.bitcast_convert_type(p, jnp.uint32)) for p in parameters.values()]
    return parameters, momentum, value, bits[0] ^ bits[1]


class Work:
    """All state, of which `tick` is one step."""

    def __init__(self, mib: int) -> None:
        self.words = jax.jit(first, static_argnums=0)(mib // 4)
        self.factor, self.addend = 1, 0
        self.key = jax.random.key(7)
        one, two = jax.random.split(jax.random.key(1))
        shape = (WIDTH, WIDTH)
        self.parameters = {
            "one": jax.random.uniform(one, shape, minval=-1) / 32,
            "two": jax.random.uniform(two, shape, minval=-1) / 32,
        }
        self.momentum = jax.tree.map(jnp.zeros_like, self.parameters)

    def tick(self, tick: int) -> tuple[bool, str]:
        self.words = update(self.words)
        self.factor = self.factor * FACTOR % WORD
        self.addend = (self.addend * FACTOR + ADDEND) % WORD
        good = right(self.words, jnp.uint32(self.factor), jnp.uint32(self.addend))
        self.parameters, self.momentum, value, bits = train(
            self.parameters, self.momentum, self.key, jnp.uint32(tick)
        )
        return bool(good), f"{int(bits):08x},{float(value).hex()}"


def main() -> None:
    options = ticking.parser(__doc__).parse_args()
    ticking.run(Work(options.mib).tick, options)


main()
