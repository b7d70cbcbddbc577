"""Values at the ends of what a config can hold: taken, or refused with one error that says what is wanted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import random_tensors, small_config, write_folder
from moe_jax.checkpoint import inspect
from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.models.config import RopeConfig
from moe_jax.models.families import config_to_hf, parse_config
from moe_jax.models.rope import frequencies
from tiny_models import tiny_config

HUGE = 10**400
BITS = "got an integer of 1329 bits"
SIZE = "wanted an integer from 1 to 2147483647"
SIZES = (
    *("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "moe_intermediate", "max_positions"),
    *("dense_intermediate", "shared_intermediate"),
)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    config = tiny_config("olmoe")
    assert getattr(replace(config, **{name: 2**31 - 1}), name) == 2**31 - 1
    for value, got in ((2**31, "got 2147483648"), (HUGE, BITS), (10**5000, "got an integer of"), (0, "got 0")):
        with pytest.raises(InvalidArgument, match=f"^ModelConfig: {name}: {got}.*{SIZE}"):
            replace(config, **{name: value})
    for value in (True, 2.0, "2", np.int64(2)):
        with pytest.raises(InvalidArgument, match=f"^ModelConfig: {name}: got .*{SIZE}"):
            replace(config, **{name: value})


def test_windows_and_tokens():
    config = tiny_config("qwen2_moe")
    with pytest.raises(InvalidArgument, match=f"windows: got 2147483648, {SIZE}"):
        replace(config, windows=(None, 1 << 31))
    for name in ("bos_token_id", "pad_token_id", "eos_token_ids"):

        def made(value: Any, name: str = name) -> Any:
            return replace(config, **{name: (3, value) if name == "eos_token_ids" else value})

        for value in (-(1 << 31), -1, (1 << 31) - 1):
            assert value in np.ravel(getattr(made(value), name))
        for value, got in ((1 << 31, "got 2147483648"), (-(1 << 31) - 1, "got -2147483649"), (HUGE, BITS)):
            with pytest.raises(InvalidArgument, match=f"^ModelConfig: {name}: {got}, wanted an integer of 32 bits"):
                made(value)


@pytest.mark.parametrize("name", ["norm_eps", "clip_qkv"])
def test_numbers(name):
    config = tiny_config("olmoe")
    replace(config, **{name: 1})
    for value, got in (
        (HUGE, BITS),
        (1e39, "got 1e\\+39"),
        (float("nan"), "got nan"),
        (1e-50, "got 1e-50"),
        (0, "got 0"),
    ):
        with pytest.raises(InvalidArgument, match=f"^ModelConfig: {name}: {got}, wanted a number from 1.2e-38 to 3.4e"):
            replace(config, **{name: value})


@pytest.mark.parametrize("name", ["theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"])
def test_numbers_of_rope(name):
    for value in (HUGE, 1e39, float("inf"), 0, -1.0, 1e-320, True, "1"):
        with pytest.raises(InvalidArgument, match=f"^rope 'yarn': {name}: got .*wanted a number from 1.2e-38"):
            RopeConfig(kind="yarn", **{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"kind": kind}, rf"^RopeConfig: kind: got {got}, wanted 'default' or 'linear' or 'yarn' or 'llama3'")
            for kind, got in (("foo", "'foo'"), (None, "None"), (["yarn"], r"\['yarn'\]"))
        ),
        *(({"truncate": value}, "truncate: got .*, wanted True or False") for value in ("no", 1, None)),
        *(
            ({name: value}, f"{name}: got .*wanted a number from")
            for name in ("attention_factor", "mscale", "mscale_all_dim")
            for value in ("", [], False, np.zeros(2))
        ),
        ({"original_max_positions": "4"}, "original_max_positions: got '4'"),
    ],
)
def test_values_of_another_kind_in_rope(change, message):
    with pytest.raises(InvalidArgument, match=message):
        RopeConfig(**{"kind": "yarn", **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": None}, "type of family: got NoneType, wanted str"),
        ({"moe": "x"}, "type of moe: got str, wanted MoEConfig"),
        ({"rope": {}}, "type of rope: got dict, wanted RopeConfig"),
        ({"rope": None}, "type of rope: got NoneType"),
        *(
            ({name: 5}, f"type of {name}: got int, wanted tuple")
            for name in ("moe_layers", "windows", "eos_token_ids", "sources")
        ),
        *(
            ({name: None}, f"type of {name}: got NoneType")
            for name in ("moe_layers", "windows", "eos_token_ids", "sources")
        ),
        ({"windows": [5]}, "type of windows: got list"),
        ({"moe_layers": (1,)}, r"moe_layers\[0\]: got 1, wanted True or False"),
        ({"moe_layers": ("yes",)}, r"moe_layers\[0\]: got 'yes'"),
        *(({"windows": (value,)}, f"windows: got .*{SIZE}") for value in ("", False, 2.0)),
        *(
            ({name: value}, f"{name}: got .*, wanted True or False")
            for name in ("qkv_bias", "out_bias", "tie_embeddings")
            for value in (None, 1, "no")
        ),
        *(({"qk_norm": value}, "qk_norm: got .*, wanted 'head' or 'projection' or None") for value in ("foo", True)),
        *(
            ({"dtype": value}, "dtype: got .*, wanted 'bfloat16' or 'float16' or 'float32' or 'float64'")
            for value in (None, 3, "int8", "foo", np.float32)
        ),
    ],
)
def test_values_of_another_kind_in_a_model(change, message):
    with pytest.raises(InvalidArgument, match=f"^ModelConfig: {message}"):
        replace(tiny_config("olmoe"), **change)


@pytest.mark.parametrize("value", [None, 3, []])
def test_what_is_no_config_is_not_read_as_one(value):
    with pytest.raises(CheckpointError, match=r"^config.json: contents: got .*, wanted a JSON object"):
        parse_config(value)
    with pytest.raises(InvalidArgument, match="config_to_hf: type of config: got"):
        config_to_hf(value)


def test_yarn_divides_by_the_logarithm_of_its_base():
    with pytest.raises(InvalidArgument, match=r"^rope 'yarn': theta: got 1.0, wanted another number than 1"):
        RopeConfig(kind="yarn", theta=1.0, factor=2.0, original_max_positions=16)
    plain, _ = frequencies(RopeConfig(theta=1.0), 8)
    assert plain.tolist() == [1.0] * 4
    with pytest.raises(InvalidArgument, match=f"original_max_positions: {BITS}, {SIZE}"):
        RopeConfig(kind="yarn", factor=2.0, original_max_positions=HUGE)


NUMBER = (
    st.floats(2.0**-126, 2.0**127) | st.integers(1, 1 << 100) | st.sampled_from([1, 1.0, 1 + 2.0**-52, 1 - 2.0**-53])
)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["default", "linear", "yarn", "llama3"]),
    numbers=st.fixed_dictionaries(
        {
            name: NUMBER
            for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale")
        }
    ),
    original=st.integers(1, 2**31 - 1),
    truncate=st.booleans(),
    head_dim=st.sampled_from([2, 128, 1 << 12]),
)
def test_what_is_taken_has_frequencies(kind, numbers, original, truncate, head_dim):
    """However extreme: no error of Python's, and one angle for each pair."""
    try:
        config = RopeConfig(kind=kind, original_max_positions=original, truncate=truncate, mscale_all_dim=1, **numbers)
    except InvalidArgument:
        assert kind == "yarn" and numbers["theta"] == 1
        return
    with np.errstate(all="ignore"):
        found, scale = frequencies(config, head_dim)
    assert found.shape == (head_dim // 2,) and isinstance(scale, float)


FILE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"rms_norm_eps": HUGE}, f"rms_norm_eps: {BITS}, wanted at most 64 bits"),
    "a size": ({"max_position_embeddings": HUGE}, f"max_position_embeddings: {BITS}, wanted at most 64 bits"),
    "a size of 64 bits": ({"max_position_embeddings": 1 << 62}, f"max_positions: got 4611686018427387904, {SIZE}"),
    "inside": ({"rope_scaling": {"rope_type": "linear", "factor": HUGE}}, f"factor: {BITS}, wanted at most 64 bits"),
    "in a list": ({"eos_token_id": [3, HUGE]}, f"eos_token_id: {BITS}, wanted at most 64 bits"),
    "more than Python reads": ({"vocab_size": "HUGE"}, "contents: got Exceeds the limit"),
    "a token": ({"eos_token_id": [3, 1 << 31]}, "eos_token_ids: got 2147483648, wanted an integer of 32 bits"),
    "a base of 1": (
        {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "theta: got 1.0, wanted another number than 1",
    ),
    "a ratio": (
        {"max_position_embeddings": 1 << 62, "rope_scaling": {"rope_type": "yarn", "factor": None}},
        "original_max_positions: got 4611686018427387904, wanted",
    ),
    "an f64": ({"rope_theta": 1e300}, r"theta: got 1e\+300, wanted a number from 1.2e-38 to 3.4e"),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_file_is_refused_by_its_name(fault, tmp_path):
    changes, message = FILE_FAULTS[fault]
    raw = small_config("olmoe")
    file = write_folder(tmp_path, raw, random_tensors(raw)) / "config.json"
    file.write_text(json.dumps(raw | changes).replace('"HUGE"', "1" + "0" * 5000))
    with pytest.raises(CheckpointError, match=message) as caught:
        inspect(tmp_path)
    assert caught.value.where == str(file) and str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": HUGE}, f"rms_norm_eps: {BITS}, wanted a positive number"),
        ({"max_position_embeddings": HUGE}, f"max_position_embeddings: {BITS}, wanted a positive integer"),
        ({"hidden_size": 10**5000}, "hidden_size: got an integer of 16610 bits"),
        ({"eos_token_id": [HUGE]}, f"eos_token_id: {BITS}, wanted an integer"),
        ({"eos_token_id": 1 << 31}, "eos_token_ids: got 2147483648, wanted an integer of 32 bits"),
        ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "theta: got 1.0, wanted another"),
    ],
)
def test_a_parsed_config_is_refused_the_same_way(changes, message):
    with pytest.raises(CheckpointError, match=f"^/m/config.json: {message}"):
        parse_config(small_config("olmoe", **changes), where="/m/config.json")


def test_tokens_of_generation_config_too(tmp_path: Path):
    raw = small_config("olmoe")
    write_folder(tmp_path, raw, random_tensors(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": HUGE}))
    with pytest.raises(CheckpointError, match=f"generation_config.json: pad_token_id: {BITS}"):
        inspect(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 1 << 40}))
    with pytest.raises(CheckpointError, match="pad_token_id: got 1099511627776, wanted an integer of 32 bits"):
        inspect(tmp_path)
