"""The NNX and Linen layers: against a direct computation, under Flax's transformations, and trained."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import meta

import moe_jax
from flax_layers import CONFIG, OPTIONS, SWIGLU, E, H, I, K, build, inputs, make, stacked, unstacked
from moe_jax import layer
from moe_jax.pallas_kernels.grouped_moe import MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig


def by_hand(arrays: dict[str, jax.Array], x: jax.Array, config: MoEConfig) -> np.ndarray:
    """The layer in float64 NumPy, row by row and expert by expert."""
    a = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    zeros = {"gate_up_bias": np.zeros(a["gate_up"].shape[:2]), "down_bias": np.zeros((E, H)), "router_bias": 0}
    a = {**zeros, "selection_bias": 0, **a}
    act, router = config.activation, config.router

    def activated(h):
        if act.name == "relu2":
            return np.maximum(h, 0) ** 2
        if act.name == "gpt_oss_swiglu":
            gate, up = np.minimum(h[0::2], act.limit), np.clip(h[1::2], -act.limit, act.limit)
            return gate / (1 + np.exp(-act.alpha * gate)) * (up + 1)
        gate, up = np.split(h, 2)
        return gate / (1 + np.exp(-gate)) * up

    rows = []
    for row in np.asarray(x, np.float64).reshape(-1, H):
        logits = a["router"] @ row + a["router_bias"]
        score = {
            "softmax": np.exp(logits) / np.exp(logits).sum(),
            "topk_softmax": logits,
            "sigmoid": 1 / (1 + np.exp(-logits)),
        }[router.score]
        ids = np.argsort(-(score + a["selection_bias"]), kind="stable")[:K]
        weights = score[ids]
        if router.score == "topk_softmax":
            weights = np.exp(weights) / np.exp(weights).sum()
        if router.renormalize:
            weights = weights / weights.sum()
        out = np.zeros(H)
        for weight, e in zip(weights * router.scaling_factor, ids, strict=True):
            h = activated(a["gate_up"][e] @ row + a["gate_up_bias"][e])
            out += weight * (a["down"][e] @ h + a["down_bias"][e])
        if "shared_down" in a:
            y = a["shared_down"] @ activated(a["shared_gate_up"] @ row)
            out += y / (1 + np.exp(-a["shared_gate"] @ row)) if "shared_gate" in a else y
        rows.append(out)
    return np.array(rows).reshape(x.shape)


def linen_variables(moe: moe_jax.nnx.MoE) -> dict[str, dict[str, jax.Array]]:
    """The arrays of an NNX layer as Linen's collections."""
    params = moe.arrays()
    state = {name: params.pop(name) for name in ("selection_bias",) if name in params}
    return {"params": params, "router_state": state} if state else {"params": params}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_flax_layers_compute_the_formula(name):
    moe, x = make(name), inputs(2, 5)
    wanted = by_hand(moe.arrays(), x, moe.config)
    np.testing.assert_allclose(moe(x), wanted, rtol=1e-5, atol=1e-5)
    config, options = OPTIONS[name]
    module = moe_jax.linen.MoE(I, config, **options)
    np.testing.assert_array_equal(module.apply(linen_variables(moe), x), moe(x))


@pytest.mark.parametrize("name", OPTIONS)
def test_linen_parameters_have_the_names_and_shapes_of_nnx(name):
    config, options = OPTIONS[name]
    variables = jax.eval_shape(moe_jax.linen.MoE(I, config, **options).init, jax.random.key(0), inputs(3))
    wanted = linen_variables(make(name))
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, wanted)


@pytest.mark.parametrize("shape", [(), (2, 3), (3, 1, 2), (0,), (2, 0)])
def test_leading_axes_may_be_any(shape):
    moe, x = make(), inputs(*shape)
    assert moe(x).shape == x.shape
    np.testing.assert_array_equal(moe(x).reshape(-1, H), moe(x.reshape(-1, H)))


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "x_dtype", "wanted"),
    [
        (None, "float32", "float32", "float32"),
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
        ("float16", "float32", "float32", "float16"),
    ],
)
def test_dtypes(dtype, param_dtype, x_dtype, wanted):
    x = inputs(5, dtype=jnp.dtype(x_dtype))
    moe = make("qwen2", dtype=dtype, param_dtype=jnp.dtype(param_dtype))
    assert moe(x).dtype == wanted
    assert {value.dtype.name for value in moe.arrays().values()} == {param_dtype}
    assert moe.router_logits(x).dtype == jnp.float32
    module = moe_jax.linen.MoE(I, *OPTIONS["plain"][:1], dtype=dtype, param_dtype=jnp.dtype(param_dtype))
    y, variables = module.init_with_output(jax.random.key(0), x)
    assert y.dtype == wanted
    assert variables["params"]["down"].dtype == param_dtype


def test_router_in_f32_is_not_rounded_to_a_narrow_compute_dtype():
    x = inputs(64)
    narrow, wide = make(dtype=jnp.bfloat16), make()
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(narrow.router_logits(x), wide.router_logits(rounded))


@pytest.mark.parametrize("experts", [1, 2, 64])
def test_initial_variance_is_that_of_one_expert(experts):
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=1), activation=SWIGLU)
    moe = moe_jax.nnx.MoE(64, 128, config, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.std(moe.gate_up[...]) * 64**0.5, 1, rtol=0.03)
    np.testing.assert_allclose(jnp.std(moe.down[...]) * 128**0.5, 1, rtol=0.03)
    if experts > 1:
        assert not np.array_equal(moe.down[0], moe.down[1])


def test_kernel_init_is_called_with_in_and_out():
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.broadcast_to(jnp.arange(shape[0], dtype=dtype)[:, None], shape)  # the number of the input

    moe = moe_jax.nnx.MoE(H, I, CONFIG, kernel_init=init, rngs=nnx.Rngs(0))
    assert shapes == [(H, E), (H, 2 * I), (I, H)]
    np.testing.assert_array_equal(moe.down[...], np.broadcast_to(np.arange(I, dtype=np.float32), (E, H, I)))


def test_refusals():
    def problem(**options):
        with pytest.raises(moe_jax.InvalidArgument) as caught:
            moe_jax.nnx.MoE(**{"features": H, "hidden_features": I, "config": CONFIG, **options}, rngs=nnx.Rngs(0))
        return caught.value.problem

    assert problem(features=0) == "features"
    assert problem(config=CONFIG.router) == "type of config"
    assert problem(shared_gate=True) == "shared_gate without a shared expert"
    assert problem(partitioning={"kernel": (None,)}) == "partitioning"
    assert problem(partitioning={"router": (None, None, None)}) == "partitioning of router"
    wrapped = nnx.with_partitioning(layer.default_kernel_init, (None, "model"), eager_sharding=False)
    assert problem(kernel_init=wrapped) == "kernel_init"
    with pytest.raises(moe_jax.InvalidArgument, match="shape of x"):
        make()(jnp.ones((2, H + 1)))
    with pytest.raises(moe_jax.InvalidArgument, match="dtype of x"):
        make()(jnp.ones((2, H), jnp.int32))
    with pytest.raises(moe_jax.InvalidArgument, match="type of rngs: got int, wanted Rngs"):
        moe_jax.nnx.MoE(H, I, CONFIG, rngs=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"hidden_features": value}, "hidden_features: got .*, wanted an integer, 1 or more")
            for value in (None, "6", 6.0, True, 0)
        ),
        *(({"shared_features": value}, "shared_features: got") for value in ("6", 6.0, True, 0)),
        *(
            ({name: value}, f"{name}: got .*, wanted True or False")
            for name in ("use_bias", "use_router_bias", "use_selection_bias", "shared_gate")
            for value in (None, 1, "no")
        ),
        *(
            ({"dtype": value}, "dtype: got .*, wanted bfloat16 or float16 or float32 or float64")
            for value in ("int8", "foo", 3, bool, object())
        ),
        *(
            ({"param_dtype": value}, "param_dtype: got .*, wanted a floating point dtype")
            for value in ("int8", "foo", 3, None)
        ),
        *(({"kernel_init": value}, "kernel_init: got .*, wanted a function") for value in (None, "x")),
        *(({"partitioning": value}, "type of partitioning: got .*, wanted Mapping") for value in (None, 3, ["router"])),
        *(
            ({"partitioning": {"router": value}}, "partitioning of router: got .*, wanted at most 2 axis names")
            for value in (None, 3, "ab", (3,))
        ),
    ],
)
def test_options_of_another_kind_are_refused(kind, options, message):
    with pytest.raises(moe_jax.InvalidArgument, match=f"^{kind}.MoE: {message}"):
        make_either(kind, **options)


def make_either(kind: str, **options: Any) -> Any:
    options = {"hidden_features": I, "config": CONFIG, **options}
    if kind == "nnx":
        return moe_jax.nnx.MoE(H, **options, rngs=nnx.Rngs(0))
    return jax.eval_shape(moe_jax.linen.MoE(**options).init, jax.random.key(0), inputs(3))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_sizes_and_switches_of_numpy_are_taken(kind):
    make_either(kind, hidden_features=np.int64(I), shared_features=np.int32(4), use_bias=np.bool_(True))


@pytest.mark.parametrize("x", [None, 3, "x", [[1.0] * H], jnp.float32(1)])
def test_what_is_no_array_of_rows_is_refused(x):
    linen_layer = moe_jax.linen.MoE(I, CONFIG)
    for call in (make(), make().router_logits, lambda x: linen_layer.init(jax.random.key(0), x)):
        with pytest.raises(moe_jax.InvalidArgument, match=r"MoE: (type|shape) of x: got"):
            call(x)


@pytest.mark.parametrize("name", OPTIONS)
def test_C64_graph_definitions_hash_and_compare_equal_and_compile_once(name):
    (first, state), (second, other) = nnx.split(build(name)), nnx.split(make(name, seed=1))
    assert hash(first) == hash(second)
    assert first == second
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, state, x):
        traces.append(x.shape)
        return nnx.merge(graph, state)(x)

    x = inputs(3)
    assert not np.array_equal(run(first, state, x), run(second, other, x))
    assert traces == [(3, H)]
    # A layer built without arrays is the same layer.
    empty, _ = nnx.split(nnx.eval_shape(lambda: build(name)))
    assert empty == first
    np.testing.assert_array_equal(nnx.merge(empty, state)(x), run(first, state, x))


def test_C64_static_attributes_are_hashable_and_tell_configurations_apart():
    graph, _ = nnx.split(make())
    assert graph != nnx.split(make(dtype=jnp.bfloat16))[0]
    for value in (v for k, v in vars(make()).items() if k in ("features", "hidden_features", "config", "dtype")):
        hash(value)
        assert not isinstance(value, list)


def test_nnx_jit_grad_and_vmap_over_the_batch():
    moe, x = make("deepseek"), inputs(3, 5)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(moe, x), moe(x), rtol=1e-5, atol=1e-6)
    batched = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(moe, x)
    np.testing.assert_allclose(batched, moe(x), rtol=1e-5, atol=1e-6)

    grads = nnx.grad(lambda m, x: jnp.sum(jnp.square(m(x))))(moe, x)
    assert set(grads) == set(moe.arrays()) - {"selection_bias"}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_slopes_of_the_loss(name):
    """The steepest entries of each array, against central differences in f64 with Richardson's correction."""
    with jax.enable_x64(True):
        moe, x = make(name, param_dtype=jnp.float64), inputs(3, 5, dtype=jnp.float64)
        graph, params, rest = nnx.split(moe, nnx.Param, ...)

        @jax.jit
        def loss(params):
            return jnp.sum(jnp.square(nnx.merge(graph, params, rest)(x)))

        grads = jax.jit(jax.grad(loss))(params)
        for array in grads:
            start, grad = np.array(params[array][...]), np.asarray(grads[array][...])
            for steepest in np.argsort(-np.abs(grad), axis=None)[:3]:
                where = np.unravel_index(steepest, grad.shape)

                def slope(step, array=array, start=start, where=where):
                    ends = []
                    for value in (start[where] + step, start[where] - step):
                        moved = start.copy()
                        moved[where] = value
                        params[array].set_value(jnp.asarray(moved))
                        ends.append(float(loss(params)))
                    params[array].set_value(jnp.asarray(start))
                    return (ends[0] - ends[1]) / (2 * step)

                wanted = (4 * slope(1e-3) - slope(2e-3)) / 3
                assert abs(wanted) > 1e-2
                # Router logits and weights are f32 whatever the parameters are, and their rounding is divided by
                # the step; the other arrays leave them as they are.
                rtol = 2e-3 if array.startswith("router") else 1e-5
                np.testing.assert_allclose(grad[where], wanted, rtol=rtol, err_msg=f"{array}{where}")


@pytest.mark.parametrize("axis", [0, 1])
def test_nnx_scan_over_layers(axis):
    moe, x = stacked(3, axis), inputs(5)

    @nnx.scan(in_axes=(nnx.StateAxes({...: axis}), nnx.Carry), out_axes=nnx.Carry)
    def scan(m, x):
        return x + m(x)

    wanted = x
    for number in range(3):
        wanted = wanted + unstacked(moe, number, axis)(wanted)
    np.testing.assert_allclose(scan(moe, x), wanted, rtol=1e-5, atol=1e-6)


def test_linen_scan_over_layers_and_sown_logits():
    class Body(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + moe_jax.linen.MoE(I, CONFIG, name="moe")(x), None

    scan = linen.scan(Body, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=3)()
    x = inputs(5)
    variables = scan.init(jax.random.key(0), x, None)
    params = variables["params"]["moe"]
    assert params["gate_up"].shape == (3, E, 2 * I, H)
    (y, _), sown = scan.apply({"params": variables["params"]}, x, None, mutable=["intermediates"])
    wanted, logits = x, []
    for number in range(3):
        one = make()
        nnx.update(one, {name: value[number] for name, value in params.items()})
        logits.append(one.router_logits(wanted))
        wanted = wanted + one(wanted)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    (got,) = sown["intermediates"]["moe"]["router_logits"]
    np.testing.assert_allclose(got, jnp.stack(logits), rtol=1e-5, atol=1e-6)


def test_partitioning_metadata():
    axes = {"gate_up": ("expert", "model", None), "down": ("expert", None, "model")}
    with nnx.use_eager_sharding(False):
        specs = nnx.get_partition_spec(nnx.state(build(partitioning=axes)))
    assert specs["gate_up"].get_raw_value() == jax.P("expert", "model", None)
    assert specs["down"].get_raw_value() == jax.P("expert", None, "model")
    assert specs["router"].get_raw_value() == jax.P()
    module = moe_jax.linen.MoE(I, CONFIG, partitioning=axes)
    variables = jax.eval_shape(module.init, jax.random.key(0), inputs(3))
    assert isinstance(variables["params"]["gate_up"], meta.Partitioned)
    assert linen.get_partition_spec(variables)["params"]["down"] == jax.P("expert", None, "model")
    assert hash(module) == hash(module.clone())
    assert module == module.clone()


def test_partitioning_shards_the_parameters_on_a_mesh():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        moe = build(partitioning={"gate_up": ("expert", None, None)})
    assert moe.gate_up[...].sharding.spec == jax.P("expert", None, None)
    assert moe.gate_up[...].addressable_shards[0].data.shape == (E // 2, 2 * I, H)


class Model(nnx.Module):
    """One block with the layer in the place of its feed-forward part."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, H, rngs=rngs)
        self.norm = nnx.RMSNorm(H, rngs=rngs)
        self.moe = moe_jax.nnx.MoE(H, I, CONFIG, rngs=rngs)
        self.head = nnx.Linear(H, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        h = self.norm(x)
        return self.head(x + self.moe(h)), self.moe.router_logits(h)


def test_training_an_nnx_model_lowers_the_loss():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.2, momentum=0.9), wrt=nnx.Param)
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 16)
    targets = (tokens * 5 + 3) % 16
    before = model.moe.arrays()

    def loss_fn(model):
        logits, router = model(tokens)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return entropy + 0.01 * moe_jax.load_balancing_loss(router, K)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
    for name, value in model.moe.arrays().items():
        assert not np.array_equal(value, before[name]), f"{name} did not move"


def test_training_a_linen_model_lowers_the_loss():
    class LinenModel(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(16, H)(tokens)
            return linen.Dense(16)(x + moe_jax.linen.MoE(I, CONFIG)(x))

    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 16)
    targets = (tokens * 5 + 3) % 16
    params, model, optimizer = LinenModel().init(jax.random.key(0), tokens), LinenModel(), optax.sgd(0.2, momentum=0.9)

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(60):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
