"""Compressed versions of JAX's collectives, and of `jax.value_and_grad`."""
