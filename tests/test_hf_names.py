"""One layer's arrays to and from the names Hugging Face checkpoints give them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from flax_layers import CONFIG, OPTIONS, RELU2, SWIGLU, E, H, I, inputs, make, stacked, unstacked
from moe_jax import hf_names
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig

FAMILY_OPTIONS = {
    "mixtral": ("plain", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    "qwen3_moe": ("plain", "model.layers.0.mlp.experts.3.down_proj.weight"),
    "olmoe": ("plain", "model.layers.0.mlp.experts.3.down_proj.weight"),
    "qwen2_moe": ("qwen2", "model.layers.0.mlp.shared_expert.down_proj.weight"),
}


@pytest.mark.parametrize("family", FAMILY_OPTIONS)
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_hf_names_round_trip(family, layout):
    options, one_name = FAMILY_OPTIONS[family]
    moe = make(options)
    config = MoEConfig(router=CONFIG.router, activation=Activation(name="swiglu", layout=layout))
    tensors = hf_names.to_hf(moe.arrays(), config, family, prefix="model.layers.0.")
    assert one_name in tensors
    assert len(tensors) == 1 + 3 * E + (4 if family == "qwen2_moe" else 0)
    gate_name = one_name.split("mlp.")[0].split("block")[0] + (
        "block_sparse_moe.experts.1.w1.weight" if family == "mixtral" else "mlp.experts.1.gate_proj.weight"
    )
    gate_rows = moe.gate_up[1, :I] if layout == "halves" else moe.gate_up[1, 0::2]
    np.testing.assert_array_equal(tensors[gate_name], gate_rows)
    back = hf_names.from_hf(tensors, config, family, prefix="model.layers.0.")
    assert set(back) == set(moe.arrays())
    for name, value in moe.arrays().items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    # Into the modules: NNX by update, Linen as it is.
    other = make(options, seed=9)
    nnx.update(other, back)
    np.testing.assert_array_equal(other(inputs(3)), moe(inputs(3)))
    module = moe_jax.linen.MoE(I, CONFIG, **OPTIONS[options][1])
    np.testing.assert_array_equal(module.apply({"params": back}, inputs(3)), moe(inputs(3)))


def numbered(layers: int, experts: int, axis: int | None) -> dict[str, np.ndarray]:
    """Expert arrays filled with 10 * layer + expert, and 0.25 / 0.5 more in the gate and up rows."""
    fill = 10.0 * np.arange(layers)[:, None] + np.arange(experts)
    rows = np.repeat([0.25, 0.5], 3)
    arrays = {
        "router": np.broadcast_to(fill[:, :, None], (layers, experts, 2)),
        "gate_up": np.broadcast_to(fill[:, :, None, None] + rows[:, None], (layers, experts, 6, 2)),
        "down": np.broadcast_to(fill[:, :, None, None], (layers, experts, 2, 3)),
    }
    return {name: np.moveaxis(value, 0, axis or 0) for name, value in arrays.items()}


@pytest.mark.parametrize(("layers", "experts"), [(4, 4), (3, 5)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_C99_layers_and_experts_are_never_confused_when_stacked(layers, experts, axis, family):
    config = MoEConfig(router=RouterConfig(experts=experts, top_k=1), activation=SWIGLU)
    arrays, prefix = numbered(layers, experts, axis), "model.layers.{layer}."
    tensors = hf_names.to_hf(arrays, config, family, prefix=prefix, layer_axis=axis)
    names = hf_names.FAMILIES[family]
    for number in range(layers):
        block = f"model.layers.{number}.{names.block}"
        np.testing.assert_array_equal(tensors[f"{block}.gate.weight"][:, 0], 10 * number + np.arange(experts))
        for e in range(experts):
            for part, extra in ((names.gate, 0.25), (names.up, 0.5), (names.down, 0)):
                assert np.all(tensors[f"{block}.experts.{e}.{part}.weight"] == 10 * number + e + extra)
    back = hf_names.from_hf(tensors, config, family, prefix=prefix, layers=layers, layer_axis=axis)
    for name, value in arrays.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    # Unscanned: the same layers one by one.
    for number in range(layers):
        one = hf_names.from_hf(tensors, config, family, prefix=prefix.format(layer=number))
        for name, value in arrays.items():
            np.testing.assert_array_equal(one[name], np.take(value, number, axis), err_msg=name)


@pytest.mark.parametrize(("layers", "axis"), [(E, 0), (3, 0), (3, 1)])
def test_C99_scanned_flax_layers_give_the_same_names(layers, axis):
    moe = stacked(layers, axis)
    prefix = "model.layers.{layer}."
    tensors = hf_names.to_hf(moe.arrays(), CONFIG, "olmoe", prefix=prefix, layer_axis=axis)
    for number in range(layers):
        one = unstacked(moe, number, axis)
        alone = hf_names.to_hf(one.arrays(), CONFIG, "olmoe", prefix=prefix.format(layer=number))
        for name, value in alone.items():
            np.testing.assert_array_equal(tensors[name], value, err_msg=name)


def test_hf_names_keep_bf16():
    moe = make(param_dtype=jnp.bfloat16)
    tensors = hf_names.to_hf(moe.arrays(), CONFIG, "mixtral")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"bfloat16"}
    assert hf_names.from_hf(tensors, CONFIG, "mixtral")["gate_up"].dtype == jnp.bfloat16


def test_hf_names_refusals():
    arrays = make().arrays()
    tensors = hf_names.to_hf(arrays, CONFIG, "mixtral")

    def refused(change, **more):
        with pytest.raises(moe_jax.CheckpointError) as caught:
            hf_names.from_hf({**tensors, **change}, CONFIG, "mixtral", **more)
        return caught.value

    down = "block_sparse_moe.experts.2.w2.weight"
    error = refused({"block_sparse_moe.experts.4.w2.weight": tensors[down]})
    assert (error.problem, error.where) == ("extra expert", "block_sparse_moe.experts.4.w2.weight")
    error = refused({down: tensors[down].T})
    assert (error.problem, error.where, error.got) == ("shape", down, [I, H])
    without = {name: tensor for name, tensor in tensors.items() if name != down}
    with pytest.raises(moe_jax.CheckpointError, match=f"{down}: missing tensor"):
        hf_names.from_hf(without, CONFIG, "mixtral")
    for bad in (
        lambda: hf_names.to_hf(arrays, CONFIG, "gpt_oss"),
        lambda: hf_names.to_hf(arrays, RELU2, "mixtral"),
        lambda: hf_names.to_hf(arrays, CONFIG, "qwen2_moe"),  # no shared expert
        lambda: hf_names.to_hf(make("gpt_oss").arrays(), CONFIG, "mixtral"),  # biases have no name
        lambda: hf_names.to_hf(stacked(3).arrays(), CONFIG, "mixtral"),  # a layer axis that was not announced
        lambda: hf_names.to_hf(stacked(3).arrays(), CONFIG, "mixtral", prefix="layers.", layer_axis=0),
    ):
        with pytest.raises(moe_jax.InvalidArgument):
            bad()


ONE = make().arrays()
TENSORS = hf_names.to_hf(ONE, CONFIG, "mixtral")
SHARED = make("qwen2").arrays()
LAYERS = {name: np.stack([value] * 2) for name, value in ONE.items()}
P = "layers.{layer}."


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda v=v: hf_names.to_hf(v, CONFIG, "mixtral"), "type of arrays: got .*, wanted Mapping")
            for v in (None, [])
        ),
        *((lambda v=v: hf_names.to_hf(ONE, v, "mixtral"), "type of config: got") for v in (None, CONFIG.router)),
        *(
            (lambda v=v: hf_names.to_hf(ONE, CONFIG, v), "family: got .*, wanted 'mixtral' or")
            for v in (None, [], "gpt")
        ),
        *((lambda v=v: hf_names.to_hf(ONE, CONFIG, "mixtral", prefix=v), "type of prefix: got") for v in (None, 3)),
        *(
            (lambda v=v: hf_names.to_hf(LAYERS, CONFIG, "mixtral", prefix=P, layer_axis=v), "layer_axis: got")
            for v in ("0", 0.0, True, 2, -1)
        ),
        (lambda: hf_names.to_hf({**ONE, "down": "x"}, CONFIG, "mixtral"), r"shape of down: got \[\]"),
        (lambda: hf_names.to_hf({**ONE, "router": 3}, CONFIG, "mixtral"), r"shape of router: got \[\]"),
        (
            lambda: hf_names.to_hf({**SHARED, "shared_down": ONE["router"][:3]}, CONFIG, "qwen2_moe"),
            "shape of shared_down",
        ),
        (
            lambda: hf_names.to_hf({**SHARED, "shared_gate_up": ONE["router"][:3]}, CONFIG, "qwen2_moe"),
            "shape of shared_gate_up",
        ),
        (
            lambda: hf_names.to_hf({**SHARED, "shared_gate": ONE["router"][:3]}, CONFIG, "qwen2_moe"),
            "shape of shared_gate",
        ),
        (
            lambda: hf_names.to_hf({**LAYERS, "down": LAYERS["down"][:1]}, CONFIG, "mixtral", prefix=P, layer_axis=0),
            "layers of down: got 1, wanted 2",
        ),
        (
            lambda: hf_names.to_hf({**LAYERS, "down": 3}, CONFIG, "mixtral", prefix=P, layer_axis=0),
            "layers of down: got",
        ),
        *(
            (lambda v=v: hf_names.from_hf(v, CONFIG, "mixtral"), "type of tensors: got .*, wanted Mapping")
            for v in (None, "x")
        ),
        *((lambda v=v: hf_names.from_hf(TENSORS, v, "mixtral"), "type of config: got") for v in (None, 3)),
        *(
            (lambda v=v: hf_names.from_hf(TENSORS, CONFIG, "mixtral", prefix=P, layers=v), "layers: got")
            for v in ("2", 2.0, True, 0, -1)
        ),
        *(
            (
                lambda v=v: hf_names.from_hf(TENSORS, CONFIG, "mixtral", prefix=P, layers=2, layer_axis=v),
                "layer_axis: got",
            )
            for v in (None, "0", 2, -1)
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(call, message):
    with pytest.raises(moe_jax.InvalidArgument, match=message):
        call()


def test_other_braces_and_keys_are_nothing_to_stumble_over():
    for prefix in ("{x}.{layer}.", "{}{layer}"):
        tensors = hf_names.to_hf(LAYERS, CONFIG, "mixtral", prefix=prefix, layer_axis=np.int64(0))
        assert prefix.replace("{layer}", "1") + "block_sparse_moe.gate.weight" in tensors
        back = hf_names.from_hf({**tensors, 3: 3}, CONFIG, "mixtral", prefix=prefix, layers=np.int64(2))
        assert back["down"].shape == LAYERS["down"].shape
