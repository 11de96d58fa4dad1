"""Every branch on a JAX version and every private import of JAX. Supported: 0.9 to 0.12."""
import jax
from jax import lax
from jax._src.core import NamedAxisEffect  # what makes jit and scan ask which axes are bound; public nowhere
from jax.extend.core import Primitive  # noqa: F401  (re-exported)
from jax.interpreters import ad, batching, mlir  # noqa: F401  (re-exported)


def varying_axes(x) -> frozenset:
    """The manual mesh axes that `x` varies over: what shard_map's check_vma tracks."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    if hasattr(aval, "vma"):  # until 0.9
        return aval.vma
    return aval.manual_axis_type.varying


def match_varying(*arrays):
    """The arrays, all varying over the union of the axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [vary(x, axes) for x in arrays]


def vary(x, axes):
    """x, varying over `axes` besides what it varies over."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def result_aval(operands, shape, dtype, invarying=()):
    """A result of `shape` and `dtype`, whole on every device, that varies over the axes its operands vary over, but for
    those of `invarying`."""
    like = operands[0]
    mesh = like.sharding.mesh
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(shape)))
    axes = varying_axes(like) - frozenset(invarying)
    manual = dict(vma=axes) if hasattr(like, "vma") else dict(manual_axis_type=like.manual_axis_type.update(varying=axes))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=replicated, **manual)


def all_gather(x, axes, *, axis, tiled, to):
    """lax.all_gather, which in 0.9 doesn't take to="invarying"."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant

        return all_gather_invariant(x, axes, axis=axis, tiled=tiled)
    return lax.all_gather(x, axes, axis=axis, tiled=tiled, to=to)


def axis_effects(axes):
    """The effects of a primitive that communicates over named axes."""
    return {NamedAxisEffect(axis) for axis in axes}


def whole(x):
    """x on every device where its type says that it is sharded (Explicit meshes), as `result_aval` promises of results."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*(None,) * x.ndim))


def zero_tangent(primal):
    """The symbolic zero that is the tangent of `primal`."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())
