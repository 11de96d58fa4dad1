"""Compares long training loops with a model in NumPy, through overflows, changes of plans, checkpoints and ranks."""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanging import exchange_of, exchange_state, fields_of
from helpers import FULL, as_bits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jax.sharding import PartitionSpec as P
from model import Model
from training import mesh_of, place

import jaxcgx as cgx

ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
pytestmark = pytest.mark.filterwarnings("ignore:.*diverge with Sign", "ignore:.*may lose too much")

RATE = 2.0**-4
# Whole buckets, as a message is cut between them. "c" and "d" share a collective if both travel raw.
SHAPES = {"a": (16, 12), "b": (4, 10), "c": (8,), "d": ()}
# Sums of these codecs have the same bits in any program, so a second rounding is never between two levels.
LOSSY = [cgx.AbsMax(4, 8), cgx.Sign(8), cgx.TopK(0.25), cgx.Cast("bfloat16")]


@functools.cache
def loop_of(how, ranks, plans, options):
    """Returns (the first state of a training loop, its step, a function that places a state on its ranks).

    A step maps (parameters, state, {leaf: gradients of all ranks}) to (means, parameters, state).
    """
    model = Model({}, (ranks,), {}, **dict(options))
    travel = dict(schedule=model.schedule, own=model.own)
    rules = lambda plan: [(f"^{k}$", codec) for k, codec in zip(SHAPES, plan)]
    plan_of = lambda plan: cgx.Plan(cgx.Raw(), rules(plan), min_size=0, skip_1d=False, **travel)
    exchange = exchange_of(model, {start: plan_of(plan) for start, plan in plans})
    params, mesh = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}, mesh_of(ranks)
    # Its state is the mean, and it skips what is not finite.
    update = lambda grads, state, params=None: (
        jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), -RATE * g, 0), grads),
        grads,
    )
    optimizer = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    if how == "make_train_step":
        loss = lambda params, batch: sum(jnp.vdot(params[k], g[0]) for k, g in batch.items())
        train = cgx.make_train_step(loss, optimizer, mesh, exchange, donate=False)

        def step(params, state, grads):
            state, _ = train.step(whole.replace(params=params, exchange=state[0], opt_state=state[1]), grads)
            return state.params, (state.exchange, state.opt_state)

        whole = train.init(params)
        state = whole.exchange, whole.opt_state
    else:
        compressed = optax.chain(cgx.compress_gradients("data", exchange, axis_size=ranks), optimizer)
        state = compressed.init(params)
        specs = cgx.state_specs(state, "data")
        mapped = dict(in_specs=(P(), specs, P("data")), out_specs=(P(), specs), check_vma=how == "check_vma")

        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, **mapped)
        def step(params, state, grads):
            updates, state = compressed.update(jax.tree.map(lambda g: g[0], grads), state, params)
            return optax.apply_updates(params, updates), state

    placed = lambda tree: place(tree, cgx.state_specs(tree, "data"), ranks)
    return placed(state), step, placed


@st.composite
def exchanges(draw):
    """Draws the options of an exchange that it accepts together."""
    plan = st.tuples(*(st.just(cgx.Raw()) | st.sampled_from(LOSSY) for _ in SHAPES))
    plans = [(0, draw(plan))] + [(draw(st.integers(1, 6)), draw(plan))] * draw(st.booleans())
    sparse = any(codec.sparse for codec in plans[0][1])  # the first plan stays
    feedback = draw(st.sampled_from([True] * 5 + [False]))
    options = dict(
        schedule=draw(st.sampled_from(["one_shot", "two_shot"])),
        own=draw(st.sampled_from(["raw", "encoded"])),
        feedback=feedback,
        skip_nonfinite=draw(st.booleans()),
    )
    if options["schedule"] == "one_shot":
        options["own"] = "raw"
    if draw(st.sampled_from([True, True, False])):
        options |= dict(momentum=0.5, nesterov=draw(st.booleans()))
        options |= dict(momentum_masking=sparse and feedback and draw(st.booleans()))
        options |= dict(weight_decay=draw(st.sampled_from([None, 0.25])))
    if feedback:
        options |= dict(beta=draw(st.sampled_from([None, 0.25])), reset_every=draw(st.sampled_from([None, 5])))
    return tuple(plans), {name: value for name, value in options.items() if value is not None}


ranks = st.sampled_from([4, 3, 2, 1])
overflows = st.tuples(st.sampled_from(list(SHAPES)), st.sampled_from([np.inf, -np.inf, np.nan]), st.booleans())


class Loop(RuleBasedStateMachine):
    """A training loop. After every step, its means, parameters and state are those of the model."""

    @initialize(how=st.sampled_from(["make_train_step", "check_vma", "no check_vma"]), ranks=ranks, drawn=exchanges())
    def begin(self, how, ranks, drawn):
        self.how, (self.plans, self.options), self.count = how, drawn, 0
        self.params = {
            k: np.float32(np.random.RandomState(i).standard_normal(n)) for i, (k, n) in enumerate(SHAPES.items())
        }
        self.state = self.model = None
        self.build(ranks)

    def build(self, ranks):
        """Makes the loop and the model for these ranks, which take over the state."""
        first, self.step, self.placed = loop_of(self.how, ranks, self.plans, tuple(self.options.items()))
        kept = None if self.model is None else self.model.state
        self.state = first if self.state is None else self.state
        plans = {start: dict(zip(SHAPES, plan)) for start, plan in self.plans}
        self.model = Model(plans, (ranks,), self.params, **self.options)
        self.model.count = self.count
        if ranks == 1:
            self.model.plans = {0: dict.fromkeys(SHAPES, cgx.Raw())}  # one rank exchanges nothing
        if kept is not None:
            assert all(set(x) == set(y) for x, y in zip(kept, self.model.state))
            self.model.state = kept

    def adopt(self, near):
        """Checks that the state is the model's, and gives it to the model, so that roundings don't add up."""
        found = fields_of(self.state)
        for field, wanted in self.model.state._asdict().items():
            got = {k: np.array(x) for k, x in (getattr(found, field) or {}).items() if x is not None}
            assert set(got) == set(wanted), field
            for k, x in wanted.items():
                np.testing.assert_allclose(got[k], x, **near, err_msg=f"{field} of {k}")
            self.model.state = self.model.state._replace(**{field: got})
        assert exchange_state(self.state).shared.count == self.count

    @rule(
        seed=st.integers(0, 99),
        overflows=st.lists(st.none() | st.none() | st.none() | overflows, min_size=1, max_size=6),
    )
    def train(self, seed, overflows):
        """Trains a step for each of `overflows`: one gradient, or all gradients of a leaf, of one rank."""
        random = np.random.RandomState(seed)
        for overflow in overflows:
            grads = {k: np.float32(random.standard_normal((self.model.size, *n))) for k, n in SHAPES.items()}
            if overflow is not None:
                leaf, value, everywhere = overflow
                rows = grads[leaf].reshape(self.model.size, -1)
                rows[seed % len(rows), slice(None) if everywhere else seed % rows.shape[1]] = value
            wanted = self.model.step(grads)
            self.count += 1
            params, self.state = self.step(self.params, self.state, grads)
            # Steps of buckets are rounded up to 16 bits, so the last bit of a sum may move a bucket by 2**-15.
            near = dict(rtol=1e-4, atol=1e-4)
            for k, mean in self.state[1].items():
                np.testing.assert_allclose(mean, wanted[k], **near, err_msg=f"mean of {k}")
                shards = [as_bits(shard.data) for shard in params[k].addressable_shards]
                assert all((shards[0] == shard).all() for shard in shards), f"replicas of {k} differ"
                change = np.where(np.isfinite(mean), np.float32(RATE) * np.asarray(mean), np.float32(0))
                moved = self.params[k] - change
                np.testing.assert_allclose(params[k], moved, **near, err_msg=f"parameter {k}")
            self.params = self.model.params = {k: np.asarray(x) for k, x in params.items()}
            self.adopt(near)

    @precondition(lambda self: self.plans[-1][0] <= self.count and len(self.plans) < 4)
    @rule(wait=st.integers(1, 3), codecs=st.tuples(*(st.sampled_from(LOSSY) for _ in SHAPES)))
    def change_plans(self, wait, codecs):
        """Goes on with a schedule that has another plan from a step to come on, for the leaves that have a state."""
        used = [any(not codec.raw for codec in column) for column in zip(*(plan for _, plan in self.plans))]
        plan = tuple(codec if use else cgx.Raw() for codec, use in zip(codecs, used))
        start = self.count + wait
        self.plans = (*((at, each) for at, each in self.plans if at < start), (start, plan))
        self.build(self.model.size)

    @rule(ranks=ranks, way=st.sampled_from(["arrays", "file"]))
    def move(self, ranks, way):
        """Saves the state, and restores it on another number of ranks."""
        before, size = self.model.state, self.model.size
        if way == "arrays":
            saved = jax.tree.map(np.array, self.state)
            self.build(ranks)
            self.state = self.placed(cgx.reshard_state(saved, ranks))
        else:
            with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(pathlib.Path(folder) / "here", self.state)
                checkpointer.wait_until_finished()
                self.build(ranks)
                like = loop_of(self.how, ranks, self.plans, tuple(self.options.items()))[0]
                self.state = cgx.restore_state(pathlib.Path(folder) / "here", like)
        if ranks != size:
            spread = lambda rows, number: np.broadcast_to(rows.sum(0) / np.float32(number), (ranks, *rows.shape[1:]))
            self.model.state = before._replace(
                residuals={k: spread(rows, ranks) for k, rows in before.residuals.items()},
                momentum={k: spread(rows, size) for k, rows in before.momentum.items()},
            )
        self.adopt(dict(rtol=0, atol=0) if ranks == size else dict(rtol=1e-5, atol=1e-6))


TestLoop = pytest.mark.timeout(3600)(Loop.TestCase)
TestLoop.settings = settings(
    max_examples=60 if FULL else 8, stateful_step_count=12, suppress_health_check=[HealthCheck.filter_too_much]
)
