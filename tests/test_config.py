"""config.json of every family: defaults, both spellings, contradictions, and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import small_config
from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.models.config import ModelConfig, RopeConfig
from moe_jax.models.families import FAMILIES, config_to_hf, parse_config
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig

# What transformers 5.24 writes for `MixtralConfig()` and so on: every key is there.
WRITTEN: dict[str, dict[str, Any]] = {
    "mixtral": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": None,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "pad_token_id": None,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3_moe": {
        "attention_bias": False,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_attention_heads": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "olmoe": {
        "attention_bias": False,
        "bos_token_id": None,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "qwen2_moe": {
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "layer_types": ["full_attention"] * 24,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "pad_token_id": None,
        "qkv_bias": True,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


def source(config: ModelConfig, key: str) -> str:
    return dict(config.sources)[key]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given_value", ["absent", None, True, False])
def test_C17_norm_topk_prob_of_every_family(family, given_value):
    changes = {} if given_value == "absent" else {"norm_topk_prob": given_value}
    config = parse_config(small_config(family, **changes))
    if family == "mixtral":
        assert config.moe.router.renormalize is True
        said = source(config, "norm_topk_prob")
        assert said.startswith("mixtral always renormalises")
        assert ("no effect" in said) == (given_value != "absent")
    elif given_value in ("absent", None):
        assert config.moe.router.renormalize is False
        assert source(config, "norm_topk_prob") == f"default of {family}"
    else:
        assert config.moe.router.renormalize is given_value
        assert source(config, "norm_topk_prob") == "config.json"


@pytest.mark.parametrize("family", FAMILIES)
def test_C16_router_order_is_softmax_over_all_experts(family):
    assert parse_config(small_config(family)).moe.router.score == "softmax"


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(family):
    defaults = parse_config({"model_type": family})
    assert defaults == parse_config({"model_type": family, "dtype": "float32"} | WRITTEN[family])
    for key in ("head_dim", "rope_theta", "tie_word_embeddings", "eos_token_id", "norm_topk_prob"):
        if (family, key) != ("mixtral", "norm_topk_prob") and key != "head_dim":
            assert source(defaults, key) == f"default of {family}"
    assert source(defaults, "head_dim") == "hidden_size / num_attention_heads"


@pytest.mark.parametrize("family", FAMILIES)
def test_particulars_of_the_family(family):
    config = parse_config({"model_type": family})
    wanted = {
        "mixtral": (None, False, False, None, 1e6, 14336),
        "qwen3_moe": ("head", False, False, None, 1e4, 768),
        "olmoe": ("projection", False, False, None, 1e4, 2048),
        "qwen2_moe": (None, True, False, 5632, 1e4, 1408),
    }[family]
    got = (config.qk_norm, config.qkv_bias, config.out_bias, config.shared_intermediate)
    assert (*got, config.rope.theta, config.moe_intermediate) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_an_explicit_key_wins(family):
    raw = small_config(family, tie_word_embeddings=True, head_dim=4, rope_theta=77, eos_token_id=3, rms_norm_eps=0.5)
    config = parse_config(raw)
    assert (config.tie_embeddings, config.head_dim, config.rope.theta) == (True, 4, 77.0)
    assert (config.eos_token_ids, config.norm_eps) == ((3,), 0.5)
    for key in ("tie_word_embeddings", "head_dim", "rope_theta", "eos_token_id"):
        assert source(config, key) == "config.json"


def test_kv_heads_missing_is_not_kv_heads_null():
    raw = {"model_type": "mixtral"}
    assert parse_config(raw).kv_heads == 8
    assert parse_config(raw | {"num_key_value_heads": None}).kv_heads == 32
    assert parse_config({"model_type": "olmoe", "num_attention_heads": 8}).kv_heads == 8


def test_head_dim_of_qwen3_is_its_own():
    assert parse_config(small_config("qwen3_moe", head_dim=10)).head_dim == 10


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_both_names_of_the_expert_count(family):
    raw = small_config(family)
    raw.pop("num_experts", None), raw.pop("num_local_experts", None)
    assert parse_config(raw | {"num_experts": 6}) == parse_config(raw | {"num_local_experts": 6})
    with pytest.raises(CheckpointError, match=r"num_experts: got .*one value"):
        parse_config(raw | {"num_experts": 6, "num_local_experts": 7})


def test_both_names_of_the_dtype():
    raw = small_config("olmoe")
    del raw["torch_dtype"]
    assert parse_config(raw | {"torch_dtype": "float16"}).dtype == "float16"
    assert parse_config(raw | {"dtype": "float16"}).dtype == "float16"
    assert parse_config(raw | {"dtype": "float16", "torch_dtype": "bfloat16"}).dtype == "float16"
    assert source(parse_config(raw | {"torch_dtype": "float16"}), "dtype") == "config.json (torch_dtype)"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {
    "linear": ({"factor": 2}, RopeConfig(theta=5.0, kind="linear", factor=2.0)),
    "llama3": (
        LLAMA3,
        RopeConfig(theta=5.0, kind="llama3", factor=8.0, original_max_positions=32),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 20, "mscale": 0.7, "truncate": False},
        RopeConfig(
            theta=5.0, kind="yarn", factor=4.0, original_max_positions=16, beta_fast=20.0, mscale=0.7, truncate=False
        ),
    ),
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
def test_rope_in_both_forms(kind, form):
    values, wanted = SCALED[kind]
    name = "type" if form.endswith("type") else "rope_type"
    if form == "rope_parameters":
        raw = {"rope_parameters": {name: kind, "rope_theta": 5.0, **values}, "rope_theta": 9.0}
    else:
        raw = {"rope_scaling": {name: kind, **values}, "rope_theta": 5.0}
    config = parse_config(small_config("qwen3_moe", **raw))
    assert config.rope == wanted
    assert source(config, "rope_theta") == (
        "config.json (rope_parameters)" if form == "rope_parameters" else "config.json"
    )


def test_rope_values_that_are_derived():
    def rope(**values: Any) -> RopeConfig:
        beside = values.pop("beside", {})
        return parse_config(small_config("olmoe", rope_scaling={"rope_type": "yarn", **values}, **beside)).rope

    assert rope(factor=4.0).original_max_positions == 64
    assert rope(factor=4.0, beside={"original_max_position_embeddings": 8}).original_max_positions == 8
    assert rope(factor=None, original_max_position_embeddings=16).factor == 4.0
    assert rope(factor=4.0, beta_fast=None).beta_fast == 32.0


def test_rope_scaling_null_or_empty_is_the_plain_kind():
    for value in (None, {}):
        assert parse_config(small_config("olmoe", rope_scaling=value)).rope == RopeConfig(theta=10000.0)


def test_sparse_step_and_dense_layers():
    def moe_layers(**changes: Any) -> tuple[bool, ...]:
        return parse_config(small_config("qwen3_moe", num_hidden_layers=6, **changes)).moe_layers

    assert moe_layers() == (True,) * 6
    assert moe_layers(decoder_sparse_step=2) == (False, True) * 3
    assert moe_layers(decoder_sparse_step=4) == (False, False, False, True, False, False)
    assert moe_layers(mlp_only_layers=[1, 5]) == (True, False, True, True, True, False)
    assert moe_layers(decoder_sparse_step=2, mlp_only_layers=[1]) == (False, False, False, True, False, True)
    assert parse_config(small_config("qwen3_moe")).dense_intermediate is None
    assert parse_config(small_config("qwen3_moe", mlp_only_layers=[1])).dense_intermediate == 20


def test_windows():
    def windows(family: str, **changes: Any) -> tuple[int | None, ...]:
        return parse_config(small_config(family, num_hidden_layers=4, **changes)).windows

    assert windows("mixtral") == ()
    assert windows("mixtral", sliding_window=7) == (7,) * 4
    assert windows("qwen3_moe", sliding_window=7) == ()
    assert windows("qwen3_moe", sliding_window=7, use_sliding_window=True) == (7,) * 4
    assert windows("qwen3_moe", use_sliding_window=True) == (4096,) * 4
    assert windows("olmoe", sliding_window=None) == ()
    # Qwen2-MoE as transformers has it: the layers at even places, up to max_window_layers.
    assert windows("qwen2_moe", sliding_window=7, use_sliding_window=True) == (7, None, 7, None)
    assert windows("qwen2_moe", sliding_window=7, use_sliding_window=True, max_window_layers=2) == (7, None, None, None)
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert windows("qwen2_moe", sliding_window=7, use_sliding_window=True, layer_types=types) == (None, 7, None, None)
    # transformers 4 wrote the types even where the switch is off, with a window of 0.
    assert windows("qwen2_moe", sliding_window=0, use_sliding_window=False, layer_types=types) == ()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("silu", "swiglu"),
        ("swish", "swiglu"),
        ("gelu", "geglu_erf"),
        ("gelu_new", "geglu_tanh"),
        ("gelu_pytorch_tanh", "geglu_tanh"),
    ],
)
def test_activations(name, wanted):
    activation = parse_config(small_config("olmoe", hidden_act=name)).moe.activation
    assert activation == Activation(name=wanted, layout="halves")


def test_special_tokens_of_generation_config_win():
    raw = small_config("mixtral", eos_token_id=[5, 6], pad_token_id=4)
    config = parse_config(raw)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (5, 6), 4)
    config = parse_config(raw, generation={"eos_token_id": [7, 8, 9], "temperature": 0.5})
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (7, 8, 9), 4)
    assert source(config, "eos_token_id") == "generation_config.json"
    assert parse_config(raw, generation={"eos_token_id": 7}).eos_token_ids == (7,)
    assert parse_config(raw, generation={"eos_token_id": None}).eos_token_ids == ()
    with pytest.raises(CheckpointError, match=r"^/a/generation_config\.json: eos_token_id: got 'x'"):
        parse_config(raw, where="/a/config.json", generation={"eos_token_id": "x"})


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "model_type: got 'llama', wanted one of mixtral, qwen3_moe, olmoe, qwen2_moe"),
    ("qwen3_moe", {"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor of num_attention_heads=4"),
    ("qwen3_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok: got 6, wanted at most the number of experts, 5"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok: got 0, wanted a positive integer"),
    ("olmoe", {"hidden_size": 18}, "hidden_size without head_dim: got 18, wanted a multiple of num_attention_heads=4"),
    ("olmoe", {"head_dim": 8}, "head_dim: got 8, wanted hidden_size/num_attention_heads=16/4"),
    ("mixtral", {"head_dim": 5}, "head_dim: got 5, wanted an even number"),
    ("mixtral", {"hidden_size": "16"}, "hidden_size: got '16', wanted a positive integer"),
    ("mixtral", {"num_hidden_layers": True}, "num_hidden_layers: got True, wanted a positive integer"),
    ("mixtral", {"num_hidden_layers": 2.0}, "num_hidden_layers: got 2.0, wanted a positive integer"),
    ("qwen3_moe", {"norm_topk_prob": "true"}, "norm_topk_prob: got 'true', wanted true or false"),
    ("qwen3_moe", {"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, wanted a positive number"),
    ("qwen3_moe", {"hidden_act": "relu"}, "hidden_act: got 'relu', wanted one of silu"),
    ("qwen3_moe", {"torch_dtype": "float64"}, "dtype: got 'float64', wanted bfloat16 or float16 or float32"),
    ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers: got 2, wanted layer numbers from 0 to 1"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "got no MoE layer at all, wanted at least one"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0, wanted a positive integer"),
    ("qwen2_moe", {"layer_types": ["full_attention"]}, "length of layer_types: got 1, wanted num_hidden_layers=2"),
    ("qwen2_moe", {"layer_types": ["full_attention", "x"]}, "layer_types: got 'x', wanted full_attention or sliding"),
    (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 0},
        "sliding_window: got 0, wanted a positive integer",
    ),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": None}, "sliding_window: got None, wanted a positive"),
    ("mixtral", {"sliding_window": 4, "layer_types": ["full_attention"] * 2}, "wanted sliding_attention everywhere"),
    ("olmoe", {"sliding_window": 4}, "sliding_window: got 4, wanted null"),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv: got -1.0, wanted a positive number"),
    (
        "olmoe",
        {"rope_scaling": {"rope_type": "longrope"}},
        "got 'longrope', wanted one of default, linear, yarn, llama3",
    ),
    ("olmoe", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: got nothing, wanted a positive number"),
    ("olmoe", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor: got nothing, wanted a positive number"),
    ("olmoe", {"rope_parameters": {"full_attention": {}}}, "rope_parameters: got one dict for each of full_attention"),
    ("olmoe", {"rope_parameters": [1]}, r"rope_parameters: got \[1\], wanted a dict"),
    ("olmoe", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: got 0, wanted a positive number"),
    ("olmoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, wanted 1"),
    (
        "olmoe",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "high_freq_factor: got 1.0, wanted more than low_freq_factor=1.0",
    ),
    ("olmoe", {"eos_token_id": [1, "2"]}, "eos_token_id: got '2', wanted an integer"),
    ("mixtral", {"num_hidden_layers": 1 << 62}, "num_hidden_layers x num_experts: got 23058430092136939520, wanted at"),
    ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got 'fp8', wanted none"),
]


@pytest.mark.parametrize(("family", "changes", "message"), FAULTS, ids=lambda v: v if isinstance(v, str) else "")
def test_contradictions_are_refused(family, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_config(small_config(family, **changes), where="/m/config.json")
    assert str(caught.value).startswith("/m/config.json: ")


def test_no_model_type():
    with pytest.raises(CheckpointError, match="model_type: got None, wanted one of mixtral"):
        parse_config({})


ROPES = st.one_of(
    st.builds(RopeConfig, theta=st.floats(1, 1e7)),
    st.builds(RopeConfig, theta=st.floats(1, 1e7), kind=st.just("linear"), factor=st.floats(1, 64)),
    st.builds(
        RopeConfig,
        kind=st.just("yarn"),
        factor=st.floats(1, 64),
        original_max_positions=st.integers(1, 9999),
        beta_fast=st.floats(16, 64),
        beta_slow=st.floats(0.5, 2),
        attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.floats(0.5, 2),
        mscale_all_dim=st.none() | st.floats(0.5, 2),
        truncate=st.booleans(),
    ),
    st.builds(
        RopeConfig,
        kind=st.just("llama3"),
        factor=st.floats(1, 64),
        original_max_positions=st.integers(1, 9999),
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 8),
    ),
)
TOKEN = st.none() | st.integers(0, 99)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    family = draw(st.sampled_from(FAMILIES))
    layers, kv_heads, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads *= kv_heads
    qwen, biased = family.startswith("qwen"), draw(st.booleans())
    head_dim = 2 * draw(st.integers(1, 9))
    moe_layers = (True,) * layers
    if qwen:
        moe_layers = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any).map(tuple))
    window = draw(st.none() | st.integers(1, 99)) if family != "olmoe" else None
    windows: tuple[int | None, ...] = () if window is None else (window,) * layers
    if window is not None and family == "qwen2_moe":
        chosen = draw(st.lists(st.booleans(), min_size=layers, max_size=layers).filter(any))
        windows = tuple(window if one else None for one in chosen)
    experts = draw(st.integers(1, 9))
    renormalize = family == "mixtral" or draw(st.booleans())
    router = RouterConfig(experts=experts, top_k=draw(st.integers(1, experts)), renormalize=renormalize)
    name = draw(st.sampled_from(["swiglu", "geglu_erf", "geglu_tanh"]))
    return ModelConfig(
        family=family,
        vocab_size=draw(st.integers(1, 99)),
        hidden_size=heads * head_dim if family == "olmoe" else draw(st.integers(1, 99)),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        moe=MoEConfig(router=router, activation=Activation(name=name, layout="halves")),
        moe_intermediate=draw(st.integers(1, 99)),
        moe_layers=moe_layers,
        dense_intermediate=None if all(moe_layers) else draw(st.integers(1, 99)),
        shared_intermediate=draw(st.integers(1, 99)) if family == "qwen2_moe" else None,
        qk_norm={"qwen3_moe": "head", "olmoe": "projection"}.get(family),
        qkv_bias=biased and family != "mixtral",
        out_bias=biased and family in ("qwen3_moe", "olmoe"),
        clip_qkv=draw(st.none() | st.floats(0.1, 9)) if family == "olmoe" else None,
        norm_eps=draw(st.floats(1e-9, 1e-3)),
        tie_embeddings=draw(st.booleans()),
        rope=draw(ROPES),
        windows=windows,
        max_positions=draw(st.integers(1, 99999)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        bos_token_id=draw(TOKEN),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        pad_token_id=draw(TOKEN),
    )


@settings(max_examples=300, deadline=None)
@given(configs())
def test_config_to_hf_parses_back_equal(config):
    assert parse_config(json.loads(json.dumps(config_to_hf(config)))) == config


def test_config_to_hf_says_what_a_family_cannot():
    config = parse_config(small_config("mixtral"))
    assert parse_config(config_to_hf(replace(config, windows=(None, None)))) == config
    for changes, message in (
        ({"qk_norm": "head"}, "qk_norm: got head, wanted None, as mixtral has it"),
        ({"windows": (3, None)}, r"windows: got \(3, None\), wanted \(3, 3\)"),
        ({"head_dim": 5}, "head_dim: got 5, wanted an even number"),
        ({"family": "llama"}, "family: got 'llama', wanted one of"),
        ({"moe": replace(config.moe, router=RouterConfig(experts=5, top_k=2))}, "moe: got .*as mixtral has it"),
    ):
        with pytest.raises(InvalidArgument, match=f"^config_to_hf: {message}"):
            config_to_hf(replace(config, **changes))


FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*/config.json"))


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.parent.name)
def test_configs_written_by_transformers_round_trip(file):
    config = parse_config(json.loads(file.read_text()))
    assert parse_config(config_to_hf(config)) == config
