"""Every branch on a JAX version and every private import of JAX. Supported: 0.9 to 0.12."""
import jax
from jax import lax
from jax.extend.core import Primitive  # noqa: F401  (re-exported)
from jax.interpreters import ad, batching, mlir  # noqa: F401  (re-exported)


def varying_axes(x) -> frozenset:
    """The manual mesh axes that `x` varies over: what shard_map's check_vma tracks."""
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # until 0.9
        return aval.vma
    return aval.manual_axis_type.varying


def match_varying(*arrays):
    """The arrays, all varying over the union of the axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x) for x in arrays]


def result_aval(operands, shape, dtype):
    """A result of `shape` and `dtype` that varies over the axes its operands vary over, whole on every device."""
    like = operands[0]
    mesh = like.sharding.mesh
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(shape)))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=replicated)


def whole(x):
    """x on every device where its type says that it is sharded (Explicit meshes), as `result_aval` promises of results."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*(None,) * x.ndim))


def zero_tangent(primal):
    """The symbolic zero that is the tangent of `primal`."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())
