"""What compression lost and gives back later. Residuals are float32, of their leaves' shapes."""

import jax.numpy as jnp


def carry(leaves, residuals):
    """The leaves with what was lost of them before, in their own dtypes, and what that rounding loses. Where that is
    not
    finite the residual stays, as in the kernels."""
    whole = [x.astype(jnp.float32) + r for x, r in zip(leaves, residuals)]
    carried = [w.astype(x.dtype) for w, x in zip(whole, leaves)]
    lost = [w - c.astype(jnp.float32) for w, c in zip(whole, carried)]
    return carried, [jnp.where(jnp.isfinite(x), x, r) for x, r in zip(lost, residuals)]
