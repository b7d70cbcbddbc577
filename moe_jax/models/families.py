"""Hugging Face ``config.json`` <-> `ModelConfig`, for each supported ``model_type``.

Missing keys have the family's defaults (`moe_jax.models.defaults`); a key that is there always wins. Both
spellings of a config are read: rotary settings as ``rope_theta`` with ``rope_scaling``, or as
``rope_parameters``; ``torch_dtype`` or ``dtype``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.pallas_kernels.checks import check_kind, shown
from moe_jax.pallas_kernels.grouped_moe import Activation, MoEConfig
from moe_jax.pallas_kernels.route import RouterConfig

from .config import ModelConfig, RopeConfig, RopeKind
from .defaults import DEFAULTS

DTYPES = ("bfloat16", "float16", "float32")
ROPE_KINDS = get_args(RopeKind)

# Formulas, not names: transformers has several spellings of the same function (its activations.py).
_ACTIVATIONS: dict[str, Literal["swiglu", "geglu_erf", "geglu_tanh"]] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu_erf",
    "gelu_python": "geglu_erf",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
    "gelu_accurate": "geglu_tanh",
    "gelu_python_tanh": "geglu_tanh",
}
_HIDDEN_ACT = {"swiglu": "silu", "geglu_erf": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}

FAMILIES = tuple(DEFAULTS)

# Keys whose null is a value of its own; elsewhere null is a missing key, as transformers writes it.
_NULLABLE = ("num_key_value_heads", "sliding_window", "clip_qkv", "bos_token_id", "eos_token_id", "pad_token_id")
# Other names of the same key. Which one transformers writes has changed between its versions.
_ALIASES = {"num_experts": ("num_local_experts",), "dtype": ("torch_dtype",)}
_QK_NORM: dict[str, Literal["head", "projection"]] = {"qwen3_moe": "head", "olmoe": "projection"}
_ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}


@dataclass
class _Reader:
    """The keys of one config.json, checked as they are read, with a note of where each value came from."""

    raw: Mapping[str, Any]
    where: str
    family: str
    sources: dict[str, str] = field(default_factory=dict)

    def fail(self, problem: str, got: object, wanted: object) -> CheckpointError:
        return CheckpointError(problem, where=self.where, got=got, wanted=wanted)

    def get(self, key: str, kind: str) -> Any:
        """Value of a key, under any of its names, or the family's default."""
        names = [name for name in (key, *_ALIASES.get(key, ())) if name in self.raw]
        if key not in _NULLABLE:
            names = [name for name in names if self.raw[name] is not None]
        # transformers lets `dtype` win over the older `torch_dtype`; two expert counts have no such rule.
        if key != "dtype" and len({shown(self.raw[name]) for name in names}) > 1:
            raise self.fail(key, {name: self.raw[name] for name in names}, "one value")
        if not names:
            self.sources[key] = f"default of {self.family}"
            return DEFAULTS[self.family][key]
        self.sources[key] = "config.json" if names[0] == key else f"config.json ({names[0]})"
        value = self.raw[names[0]]
        return None if value is None else self.checked(names[0], value, kind)

    def checked(self, key: str, value: Any, kind: str) -> Any:
        """Refuse a value of another type: JSON's true is no integer, a text no number."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            "true or false": isinstance(value, bool),
            "a text": isinstance(value, str),
            # Of 64 bits at most, so that they can be divided; the config itself knows how large they may be.
            "an integer": number and isinstance(value, int) and value.bit_length() < 64,
            "a positive integer": number and isinstance(value, int) and 0 < value < 1 << 63,
            "a positive number": number and 0 < value <= sys.float_info.max,
            "a list": isinstance(value, list | tuple),
        }[kind]
        if not fits:
            raise self.fail(key, shown(value), kind)
        return float(value) if kind == "a positive number" else value


def parse_config(
    raw: Mapping[str, Any], *, where: str = "config.json", generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read the contents of a Hugging Face ``config.json``.

    Args:
        raw: the parsed JSON.
        where: the file's path, for errors.
        generation: the parsed ``generation_config.json``, if there is one. Its special tokens win over
            those of config.json, as in transformers; a key it lacks is taken from config.json.

    Raises:
        CheckpointError: an unknown ``model_type``, a value of the wrong type, or values that contradict
            each other; names the file, the key, what was got and what was wanted.
    """
    if not isinstance(raw, Mapping):
        raise CheckpointError("contents", where=where, got=f"a {type(raw).__name__}", wanted="a JSON object")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError("model_type", where=where, got=repr(family), wanted="one of " + ", ".join(FAMILIES))
    read = _Reader(raw, where, family)
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, Mapping) else method
        raise read.fail("quantization_config", repr(method), "none: only bf16, f16 and f32 weights are read")

    hidden, layers = read.get("hidden_size", "a positive integer"), read.get("num_hidden_layers", "a positive integer")
    moe = _moe(read)
    if layers * moe.router.experts > 1_000_000:  # everything below grows with it; the largest models have 25,000
        raise read.fail("num_hidden_layers x num_experts", layers * moe.router.experts, "at most 1000000")
    heads = read.get("num_attention_heads", "a positive integer")
    kv_heads = read.get("num_key_value_heads", "a positive integer") or heads
    if heads % kv_heads:
        raise read.fail("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    qwen = family in ("qwen3_moe", "qwen2_moe")
    moe_layers = _moe_layers(read, layers) if qwen else (True,) * layers
    dense = None if all(moe_layers) else read.get("intermediate_size", "a positive integer")
    max_positions = read.get("max_position_embeddings", "a positive integer")
    biased = "attention_bias" in DEFAULTS[family] and read.get("attention_bias", "true or false")
    bos, eos, pad = _special_tokens(read, generation)
    dtype = read.get("dtype", "a text")
    if dtype not in DTYPES:
        raise read.fail("dtype", repr(dtype), " or ".join(DTYPES))
    told = ("norm_topk_prob", "head_dim", "rope_theta", "tie_word_embeddings", "eos_token_id", "dtype")
    try:
        return ModelConfig(
            family=family,
            vocab_size=read.get("vocab_size", "a positive integer"),
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(read, hidden, heads),
            moe=moe,
            moe_intermediate=read.get("moe_intermediate_size" if qwen else "intermediate_size", "a positive integer"),
            moe_layers=moe_layers,
            dense_intermediate=dense,
            shared_intermediate=(
                read.get("shared_expert_intermediate_size", "a positive integer") if family == "qwen2_moe" else None
            ),
            qk_norm=_QK_NORM.get(family),
            qkv_bias=read.get("qkv_bias", "true or false") if family == "qwen2_moe" else biased,
            out_bias=biased,
            clip_qkv=read.get("clip_qkv", "a positive number") if family == "olmoe" else None,
            norm_eps=read.get("rms_norm_eps", "a positive number"),
            tie_embeddings=read.get("tie_word_embeddings", "true or false"),
            rope=_rope(read, max_positions),
            windows=_windows(read, layers),
            max_positions=max_positions,
            dtype=dtype,
            bos_token_id=bos,
            eos_token_ids=eos,
            pad_token_id=pad,
            sources=tuple((key, read.sources[key]) for key in told),
        )
    except InvalidArgument as error:  # a value that no config of any origin may have
        raise read.fail(error.problem, error.got, error.wanted) from error


def _head_dim(read: _Reader, hidden: int, heads: int) -> int:
    head_dim = read.get("head_dim", "a positive integer")
    if head_dim is None:
        if hidden % heads:
            raise read.fail("hidden_size without head_dim", hidden, f"a multiple of num_attention_heads={heads}")
        head_dim = hidden // heads
        read.sources["head_dim"] = "hidden_size / num_attention_heads"
    if head_dim % 2:
        raise read.fail("head_dim", head_dim, "an even number (rotary embedding turns pairs)")
    if read.family == "olmoe" and head_dim * heads != hidden:
        wanted = f"hidden_size/num_attention_heads={hidden}/{heads}: olmoe normalises over hidden_size"
        raise read.fail("head_dim", head_dim, wanted)
    return head_dim


def _moe(read: _Reader) -> MoEConfig:
    experts, top_k = (read.get(key, "a positive integer") for key in ("num_experts", "num_experts_per_tok"))
    if top_k > experts:
        raise read.fail("num_experts_per_tok", top_k, f"at most the number of experts, {experts}")
    hidden_act = read.get("hidden_act", "a text")
    if hidden_act not in _ACTIVATIONS:
        raise read.fail("hidden_act", repr(hidden_act), "one of " + ", ".join(_ACTIVATIONS))
    if read.family == "mixtral":
        renormalize, source = True, "mixtral always renormalises"
        if "norm_topk_prob" in read.raw:
            source += f"; norm_topk_prob={read.raw['norm_topk_prob']!r} in config.json has no effect"
        read.sources["norm_topk_prob"] = source
    else:
        renormalize = read.get("norm_topk_prob", "true or false")
    return MoEConfig(
        router=RouterConfig(experts=experts, top_k=top_k, score="softmax", renormalize=renormalize),
        activation=Activation(name=_ACTIVATIONS[hidden_act], layout="halves"),
    )


def _moe_layers(read: _Reader, layers: int) -> tuple[bool, ...]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer, counted from one, unless listed as dense."""
    step = read.get("decoder_sparse_step", "a positive integer")
    dense = read.get("mlp_only_layers", "a list")
    for layer in dense:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < layers:
            raise read.fail("mlp_only_layers", repr(layer), f"layer numbers from 0 to {layers - 1}")
    found = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(found):
        raise read.fail("decoder_sparse_step and mlp_only_layers", "no MoE layer at all", "at least one")
    return found


def _windows(read: _Reader, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, or () when no layer has one.

    Qwen has a switch, Qwen2-MoE a choice by layer, OLMoE no window at all.
    """
    types = read.get("layer_types", "a list")
    if types is not None:
        names = ("full_attention", "sliding_attention")
        for name in types:
            if name not in names:
                raise read.fail("layer_types", repr(name), " or ".join(names))
        if len(types) != layers:
            raise read.fail("length of layer_types", len(types), f"num_hidden_layers={layers}")
    # transformers writes sliding_window 0 where the switch is off, so the number is looked at afterwards.
    switched = "use_sliding_window" in DEFAULTS[read.family]
    if switched and not read.get("use_sliding_window", "true or false"):
        return ()
    window = read.get("sliding_window", "a positive integer")
    if read.family == "olmoe" and window is not None:
        raise read.fail("sliding_window", window, "null: olmoe has full attention")
    if read.family != "qwen2_moe":
        own = ["full_attention" if window is None else "sliding_attention"] * layers
        if types is not None and list(types) != own:
            raise read.fail("layer_types", list(types), f"{own[0]} everywhere (sliding_window={window})")
        return () if window is None else (window,) * layers
    if types is None:
        limit = read.get("max_window_layers", "an integer")
        types = ["sliding_attention" if i % 2 == 0 and i < limit else "full_attention" for i in range(layers)]
    if window is None and "sliding_attention" in types:
        raise read.fail("sliding_window", None, "a positive integer, for the sliding_attention layers")
    if "sliding_attention" not in types:
        return ()
    return tuple(window if name == "sliding_attention" else None for name in types)


def _rope(read: _Reader, max_positions: int) -> RopeConfig:
    """Rotary settings of either form; inside the dict wins over beside it, ``rope_scaling`` over the newer name."""
    form = "rope_scaling" if read.raw.get("rope_scaling") else "rope_parameters"
    given = read.raw.get(form) or {}
    if not isinstance(given, Mapping):
        raise read.fail(form, repr(given), "a dict")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise read.fail(form, f"one dict for each of {', '.join(given)}", "one set of values for all layers")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise read.fail(f"{form}.rope_type", repr(kind), "one of " + ", ".join(ROPE_KINDS))
    partial = given.get("partial_rotary_factor", read.raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise read.fail("partial_rotary_factor", partial, "1: the whole head is rotated")

    def get(key: str, wanted: str = "a positive number", default: Any = None) -> Any:
        value = given.get(key)
        return default if value is None else read.checked(f"{form}.{key}", value, wanted)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise read.fail(f"{form}.{key}", "nothing", f"a positive number (rope_type {kind!r} needs it)")
        return value

    theta = get("rope_theta")
    if theta is None:
        theta = read.get("rope_theta", "a positive number")
    else:
        read.sources["rope_theta"] = f"config.json ({form})"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=need("factor"))
    beside = read.raw.get("original_max_position_embeddings")
    if beside is None:
        original = get("original_max_position_embeddings", "a positive integer", max_positions)
    else:
        original = read.checked("original_max_position_embeddings", beside, "a positive integer")
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        if high <= low:
            raise read.fail(f"{form}.high_freq_factor", high, f"more than low_freq_factor={low}")
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=need("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    # A yarn factor of null means the ratio of the two context lengths; a missing one is refused, as it is there.
    factor = max_positions / original if given.get("factor", 0) is None else need("factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=get("beta_fast", default=32.0),
        beta_slow=get("beta_slow", default=1.0),
        attention_factor=get("attention_factor"),
        mscale=get("mscale"),
        mscale_all_dim=get("mscale_all_dim"),
        truncate=get("truncate", "true or false", True),
    )


def _special_tokens(
    read: _Reader, generation: Mapping[str, Any] | None
) -> tuple[int | None, tuple[int, ...], int | None]:
    """Begin, end and padding tokens; an end token may be one number or a list."""
    found: dict[str, Any] = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        source = read
        if generation is not None and key in generation:
            beside = str(Path(read.where).with_name("generation_config.json"))
            source = _Reader(generation, beside, read.family)
        many = key == "eos_token_id" and isinstance(source.raw.get(key), list)
        found[key] = source.get(key, "a list" if many else "an integer")
        if many:
            found[key] = tuple(source.checked(key, item, "an integer") for item in found[key])
        read.sources[key] = source.sources[key] if source is read else "generation_config.json"
    eos = found["eos_token_id"]
    eos = () if eos is None else eos if isinstance(eos, tuple) else (eos,)
    return found["bos_token_id"], eos, found["pad_token_id"]


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The contents of a ``config.json`` that parses back to an equal config.

    Written in the older form (``rope_theta``, ``rope_scaling``, ``torch_dtype``), which every version of
    transformers reads.

    Raises:
        InvalidArgument: the family has no way to say what the config says (a fault of the config, not of a file).
    """
    check_kind("config_to_hf", "config", config, ModelConfig)
    if config.family not in FAMILIES:
        wanted = "one of " + ", ".join(FAMILIES)
        raise InvalidArgument("family", where="config_to_hf", got=repr(config.family), wanted=wanted)
    qwen, router = config.family in ("qwen3_moe", "qwen2_moe"), config.moe.router
    eos = config.eos_token_ids
    windows = [window for window in config.windows if window is not None]
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "torch_dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _HIDDEN_ACT.get(config.moe.activation.name, config.moe.activation.name),
        "num_local_experts" if config.family == "mixtral" else "num_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "sliding_window": windows[0] if windows else None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.pad_token_id,
    }
    if config.family != "mixtral":
        out["norm_topk_prob"] = router.renormalize
    if config.family in ("qwen3_moe", "olmoe"):
        out["attention_bias"] = config.qkv_bias
    if config.family == "olmoe":
        out["clip_qkv"] = config.clip_qkv
    if config.dense_intermediate is not None:
        out["intermediate_size"] = config.dense_intermediate
    out["moe_intermediate_size" if qwen else "intermediate_size"] = config.moe_intermediate
    if qwen:
        out["decoder_sparse_step"] = 1
        out["mlp_only_layers"] = [i for i, moe in enumerate(config.moe_layers) if not moe]
        out["use_sliding_window"] = bool(windows)
    if config.family == "qwen2_moe":
        out["qkv_bias"] = config.qkv_bias
        out["shared_expert_intermediate_size"] = config.shared_intermediate
        if windows:
            out["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.windows]
    try:
        back = parse_config(out, where="config_to_hf")
    except CheckpointError as error:
        wanted = f"{error.wanted}, as {config.family} has it"
        raise InvalidArgument(error.problem, where="config_to_hf", got=error.got, wanted=wanted) from error
    plain = config if windows else replace(config, windows=())  # a None for each layer says the same
    for item in fields(ModelConfig):
        ours, theirs = getattr(plain, item.name), getattr(back, item.name)
        if item.compare and ours != theirs:
            raise InvalidArgument(
                item.name, where="config_to_hf", got=ours, wanted=f"{theirs}, as {config.family} has it"
            )
    return out


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    out: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        out["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        out |= {key: value for key in keys if (value := getattr(rope, key)) is not None}
    return out
