"""house.py: counts the size of the code, its storeys, and what tracing a step enters.

Without options, it writes benchmarks/results/house.md and house.json. With --programs, it writes NAME.md and NAME.json
there: the collectives of compiled programs, and their copies of large arrays. With --check, it writes nothing, prints
the counts that are above GOALS, and fails if one is above LIMITS.
"""

import argparse
import collections
import cProfile
import functools
import itertools
import math
import multiprocessing
import pathlib
import pstats
import re
import socket
import sys

import jax
import jax.numpy as jnp
import optax
import source
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.report import results

FOLDER = source.ROOT / "benchmarks/results"
COPY = re.compile(r"= \w+\[([\d,]*)\]\S* copy(?:-start)?\(")
HEAD = ("program", "operation", "over", "axes", "ranks", "dtype", "bytes", "codec", "schedule", "times")
MEMORY = ("program", "copies", "alias_bytes", "temporary_bytes")
ASKS = "jaxcgx.plan.assignment", "Assignment.routes"  # the function that a question to the plan calls
LEAVES = 1000
ADDED = f"Python calls added to JAX's own, {LEAVES:,} leaves"
LARGE = 16 * 1024  # elements of a copy that counts

PARAMS = {"w": jax.ShapeDtypeStruct((512, 256), jnp.float32), "b": jax.ShapeDtypeStruct((256,), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((16, 512), jnp.float32), jax.ShapeDtypeStruct((16, 256), jnp.float32)
BITS, DATA = cgx.MaxMin(4), P("data")
ADAM = optax.adam(1e-3)


def loss(params, batch):
    return ((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2).mean()


def loss_aux(params, batch):
    errors = (batch[0] @ params["w"] + params["b"] - batch[1]) ** 2
    return errors.mean(), {"errors": errors, "largest": errors.max()}


def mesh(**sizes):
    sizes = sizes or {"data": 4}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def train(exchange=BITS, loss_fn=loss, optimizer=ADAM, over=None, **options):
    """Returns the functions (init, step) of training."""
    made = cgx.make_train_step(loss_fn, optimizer, mesh(**over or {}), exchange, **options)
    return made.init, made.step


def value_and_grad():
    return lambda params: (params,), jax.jit(cgx.value_and_grad(loss, "data", BITS, mesh=mesh()))


def compress_gradients():
    tx = cgx.compress_gradients("data", BITS)
    with jax.set_mesh(mesh()):
        specs = cgx.state_specs(jax.eval_shape(tx.init, PARAMS), "data")

    def init(params):
        with jax.set_mesh(mesh()):
            return params, tx.init(params)

    def step(params, state, batch):
        grads = cgx.grad(loss, "data", None)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = jax.shard_map(step, mesh=mesh(), in_specs=(P(), specs, DATA), out_specs=(P(), specs))
    return init, jax.jit(sharded, donate_argnums=(0, 1))


def hierarchy():
    plan = {"node": BITS, "local": cgx.Raw()}
    return train(plan, over={"node": 2, "local": 2}, sharding=cgx.Sharding(("node", "local")))


def priority():
    """The first step has nothing to exchange, so a state is that after it."""
    init, step = train(overlap=cgx.Priority())
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), BATCH)
    return lambda params: step(init(params), batch)[0], step


# What is counted while it is traced. Each makes (init, step).
TRACED = {
    "make_train_step": train,
    "with aux": lambda: train(loss_fn=loss_aux, has_aux=True),
    "DGC": lambda: train(cgx.DGC()),
    "DGT": lambda: train(cgx.wan.Differential(BITS)),
    "mixed sync": lambda: train(cgx.wan.MixedSync(BITS)),
    "DiLoCo": lambda: train(cgx.wan.Diloco(BITS, every=4)),
    "value_and_grad": value_and_grad,
    "compress_gradients": compress_gradients,
}
# What is compiled, in addition to the above.
COMPILED = TRACED | {
    "ring, no feedback": lambda: train(cgx.Feedback(cgx.Plan.every(BITS, schedule="ring"), keep=False)),
    "PowerSGD": lambda: train(cgx.PowerSGD(2)),
    "overlap with the backward pass": lambda: train(overlap="backward"),
    "priority": priority,
    "4 micro-batches": lambda: train(accumulate=4),
    "ZeRO-1": lambda: train(sharding=cgx.Sharding(optimizer=cgx.shard_specs(PARAMS, mesh()))),
    "FSDP": lambda: train(sharding=cgx.Sharding(params=cgx.shard_specs(PARAMS, mesh()))),
    "hierarchy": hierarchy,
    "Tcp": lambda: train(over={"data": 2}, sharding=cgx.Sharding(cgx.Tcp("data", timeout=60))),
}
BETWEEN_PROCESSES = ("Tcp",)

STEPS = [name for name in TRACED if name not in ("value_and_grad", "compress_gradients")]
# (table, row, column): the most that is allowed.
LIMITS = {
    ("traced", "make_train_step step", "files"): 34,
    ("traced", "make_train_step step", "functions"): 240,
    **{("traced", f"{name} step", "files"): 40 for name in ("DGC", "DGT", "DiLoCo")},
    **{("traced", f"{name} step", "plan asked, with init"): 2 for name in STEPS},
    **{("traced", f"{name} step", "upward, not passed in"): 0 for name in TRACED},
    ("code", "imports upward", "count"): 0,
    ("code", "files that look into programs, without explain", "count"): 1,
    ("code", "lines of jaxcgx/", "count"): 27_430,
    ("code", "files of jaxcgx/", "count"): 170,
    ("code", "bodies over 60 lines", "count"): 0,
    ("code", "complexity over 15", "count"): 0,
    ("code", "functions over 7 parameters", "count"): 0,
    ("code", "annotations that are Any (%)", "count"): 8,
    ("code", "class names that exist twice", "count"): 0,
    ("code", ADDED, "count"): 1_290_000,
}
GOALS = {("code", "lines of jaxcgx/", "count"): 24_500, ("code", "lines of tests/", "count"): 30_000}


def four_devices():
    jax.config.update("jax_num_cpu_devices", 4)


def in_process(function, *args):
    """Calls a function in a process of its own with four devices, where nothing has been traced before."""
    with multiprocessing.get_context("spawn").Pool(1, four_devices) as pool:
        return pool.apply(function, args)


def calls_of(function, *args):
    """Returns the number of Python's calls, also those of functions in C."""
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    return pstats.Stats(profile).total_calls


def many_leaves(params, batch):
    return sum(jnp.vdot(x, x) for x in params.values()) * batch[0].mean() + batch[1].mean()


def added_calls():
    """Returns how many more calls the trace of a training step has than that of the same step in plain JAX."""
    sgd, small = optax.sgd(1e-2), {"a": jnp.zeros((8, 16))}
    large = {f"l{k:04d}": jnp.zeros((8, 16)) for k in range(LEAVES)}

    def of_rank(params, batch):
        return jax.lax.pmean(jax.value_and_grad(many_leaves)(params, batch), "data")

    def plain(params, state, batch):
        sharded = jax.shard_map(of_rank, mesh=mesh(), in_specs=(P(), DATA), out_specs=P(), check_vma=False)
        value, grads = sharded(params, batch)
        updates, state = sgd.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    found = []
    for make in (
        lambda: (lambda given: (given, sgd.init(given)), jax.jit(plain)),
        lambda: train(cgx.Plan(BITS, min_size=0), many_leaves, sgd),
    ):
        for params in (small, large):  # the first trace imports and caches
            init, step = make()
            count = calls_of(step.trace, *arguments(init(params)))
        found.append(count)
    return found[1] - found[0]


def arguments(state):
    """Returns the arguments of a step, from what `init` returned."""
    return (*(state if type(state) is tuple else (state,)), BATCH)


class Trace:
    """Counts the calls of the package's functions while it is entered.

    A call of a function in a storey above is upward. The function was passed in if the caller's variables have it, or
    an object with it: as a method or a property of the object's class, or in its fields (`codes`). So a transport or
    an exchange that was passed in may be asked for what it does. A function from anywhere else, such as a table of a
    module, was not passed in. Imports are counted apart, also those inside functions.
    """

    def __init__(self):
        self.files, self.functions, self.upward = set(), collections.Counter(), collections.Counter()

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event != "call" or not (name := module_of(frame.f_code)):
            return
        self.files.add(frame.f_code.co_filename)
        self.functions[name, frame.f_code.co_qualname] += 1
        caller = frame.f_back
        while caller and not module_of(caller.f_code):
            caller = caller.f_back
        if caller and source.storey(name) < source.storey(module_of(caller.f_code)):
            given = any(frame.f_code is each for value in caller.f_locals.values() for each in codes(value))
            by = f"{module_of(caller.f_code)}.{caller.f_code.co_qualname}"
            self.upward[by, f"{name}.{frame.f_code.co_qualname}", given] += 1


@functools.cache
def module_of(code):
    """Returns the package's module that has this code, or None."""
    path = pathlib.Path(code.co_filename)
    return source.name_of(path) if path.is_relative_to(source.ROOT / "jaxcgx") else None


def codes(value, depth=3):
    """Yields the code of a function, and of the functions in a container, in an object's fields and of its class."""
    value = getattr(value, "__func__", value)
    if hasattr(value, "__code__"):
        yield value.__code__
    yield from codes_of_class(value if isinstance(value, type) else type(value))
    inner = [getattr(value, name, None) for name in ("func", "__wrapped__")] if callable(value) else []
    inner += value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
    inner += vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else []
    for each in inner if depth else ():
        yield from codes(each, depth - 1)


@functools.cache
def codes_of_class(kind):
    """Returns the code of the methods and properties of a class of the package, and of its bases."""
    found = [member for base in kind.__mro__ if base.__module__.startswith("jaxcgx.") for member in vars(base).values()]
    names = "fget", "func", "__func__"  # of properties, cached properties, class methods
    functions = [next((getattr(each, name) for name in names if hasattr(each, name)), each) for each in found]
    return [each.__code__ for each in functions if hasattr(each, "__code__")]


def traced(name):
    """Returns (rows of what tracing a case enters, {upward call to what was not passed in: count} of the step)."""
    init, step = TRACED[name]()
    params = {k: jnp.zeros(x.shape, x.dtype) for k, x in PARAMS.items()}
    with Trace() as first:
        state = init(params)
    with Trace() as second:
        step.trace(*arguments(state))
    asked = [trace.functions[ASKS] for trace in (first, second)]
    rows = {}
    for word, trace, questions in ("init", first, asked[0]), ("step", second, sum(asked)):
        rows[f"{name} {word}"] = {
            "files": len(trace.files),
            "functions": len(trace.functions),
            "calls": trace.functions.total(),
            "upward": trace.upward.total(),
            "upward, not passed in": sum(count for (*_, given), count in trace.upward.items() if not given),
            "plan asked, with init": questions,
        }
    return rows, {" -> ".join(call): count for (*call, given), count in second.upward.items() if not given}


def compiled(name):
    """Returns the rows of a case's collectives and of its copies."""
    init, step = COMPILED[name]()
    state = arguments(init({k: jnp.zeros(x.shape, x.dtype) for k, x in PARAMS.items()}))
    made = step.programs(*state) if hasattr(step, "programs") else [step.lower(*state).compile()]
    rows, memory = collections.Counter(), []
    for number, program in enumerate(made):
        for c in cgx.explain(program, show=False).collectives:
            axes = ", ".join(map(str, c.axes or ()))
            rows[number, c.operation, c.over, axes, c.ranks, c.dtype, c.bytes, c.codec, c.schedule] += c.times or 1
        sizes = [math.prod(map(int, filter(None, found.split(",")))) for found in COPY.findall(program.as_text())]
        found = program.memory_analysis()
        large = sum(size >= LARGE for size in sizes)
        memory.append((number, large, found.alias_size_in_bytes, found.temp_size_in_bytes))
    return (
        [dict(zip(("case", *HEAD), (name, *row, times))) for row, times in sorted(rows.items())],
        [dict(zip(("case", *MEMORY), (name, *row))) for row in memory],
    )


def compiled_as_rank(name, address, rank):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_enable_preemption_service", False)  # it would catch the SIGTERM that ends a pool's process
    jax.distributed.initialize(address, 2, rank)
    return compiled(name)


def compiled_between(name):
    """Returns the rows of `compiled` of the first of two processes."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.starmap(compiled_as_rank, [(name, address, rank) for rank in range(2)], chunksize=1)[0]


def table(rows):
    """Returns the lines of a table of rows with the same keys."""
    cells = lambda row: [f"{value:,}" if isinstance(value, int) else str(value) for value in row]
    lines = [[key.replace("_", " ") for key in rows[0]], ["---"] * len(rows[0]), *(cells(row.values()) for row in rows)]
    return ["", *(f"| {' | '.join(line)} |" for line in lines)]


def write(file, data, texts):
    """Writes the data, and the tables that `texts` introduces: {table: text}."""
    lines = [f"Made by `{data['command']}` on {data['date']} with jax {data['versions']['jax']}."]
    for name, text in texts.items():
        lines += ["", text, *table(data[name])]
    results.write(FOLDER / f"{file}.json", data)
    (FOLDER / f"{file}.md").write_text("\n".join(lines) + "\n")


def programs(file):
    rows = [
        (compiled_between if name in BETWEEN_PROCESSES else functools.partial(in_process, compiled))(name)
        for name in COMPILED
    ]
    collectives, memory = (list(itertools.chain(*part)) for part in zip(*rows))
    data = results.origin(f"make house PROGRAMS={file}") | {"collectives": collectives, "memory": memory}
    write(
        file,
        data,
        {
            "collectives": "The collectives of compiled steps, as `explain` finds them: the bytes that a rank sends "
            "each time, and how often.",
            "memory": f"Copies of arrays of at least {LARGE:,} elements in these programs, and a device's memory.",
        },
    )


def counts():
    """Returns {table: rows}."""
    found = [in_process(traced, name) for name in TRACED]
    up = [
        {"case": case, "call": call, "times": times}
        for case, (_, calls) in zip(TRACED, found)
        for call, times in calls.items()
    ]
    listed = lambda given: [{"what": what, "count": count} for what, count in given.items()]
    return {
        "traced": [{"case": case} | row for rows, _ in found for case, row in rows.items()],
        "code": listed(source.code() | {ADDED: in_process(added_calls)}),
        "looks": listed(source.looks_into_programs()),
        "upward": up,
    }


def above(found, limits):
    """Returns a text for each count in the tables `found` that is above its limit."""
    rows = {(name, next(iter(row.values()))): row for name, given in found.items() for row in given}
    counts = [(row, column, rows[table, row][column], most) for (table, row, column), most in limits.items()]
    return [f"{row}: {column} {got:,}, at most {most:,}" for row, column, got, most in counts if got > most]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", metavar="NAME", help="write the collectives of compiled programs in NAME.md")
    parser.add_argument("--check", action="store_true", help="fail if a count is above its limit")
    options = parser.parse_args()
    if options.programs:
        programs(options.programs)
        return
    found = counts()
    if options.check:
        for goal in above(found, GOALS):
            print(f"not reached: {goal}")
        sys.exit("\n".join(above(found, LIMITS)) or None)
    data = results.origin("make house") | found
    write(
        "house",
        data,
        {
            "traced": "What tracing a step of two leaves on four devices enters in jaxcgx: files, functions, calls, "
            "calls of functions in storeys above, and how often the plan is asked for codecs.",
            "code": "The code. Bodies, complexity (McCabe's), parameters, types and classes are those of jaxcgx/.",
            "looks": "Reads of a jaxpr's `.eqns` in each module.",
        },
    )


if __name__ == "__main__":
    main()
