"""Loading and saving: every family and layout, order of axes, dtypes, memory, and the way back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from checkpoint_files import arrays_of, assert_same, fuse, random_tensors, shapes, small_config, write_folder
from moe_jax.checkpoint import inspect, load_module, save_module
from moe_jax.checkpoint import load as load_file
from moe_jax.errors import InvalidArgument
from moe_jax.models.decoder import Decoder
from moe_jax.models.families import FAMILIES

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_in_its_place(family, fused, tmp_path):
    biased = {"attention_bias": True} if family in ("qwen3_moe", "olmoe") else {}
    raw = small_config(family, **biased)
    tensors = random_tensors(raw)
    _, module = load_module(write_folder(tmp_path, raw, fuse(tensors, raw) if fused else tensors))
    t = {name.removeprefix("model."): array for name, array in tensors.items()}
    wanted = {("embed",): t["embed_tokens.weight"], ("norm",): t["norm.weight"], ("head",): t["lm_head.weight"]}
    for i in range(2):
        layer, at = f"layers.{i}", ("blocks", i)
        wanted[*at, "attention_norm"] = t[f"{layer}.input_layernorm.weight"]
        wanted[*at, "mlp_norm"] = t[f"{layer}.post_attention_layernorm.weight"]
        attention = f"{layer}.self_attn"
        wanted[*at, "attention", "out"] = t[f"{attention}.o_proj.weight"]
        wanted[*at, "attention", "qkv"] = np.concatenate([t[f"{attention}.{x}_proj.weight"] for x in "qkv"])
        if biased or family == "qwen2_moe":
            wanted[*at, "attention", "qkv_bias"] = np.concatenate([t[f"{attention}.{x}_proj.bias"] for x in "qkv"])
        if biased:
            wanted[*at, "attention", "out_bias"] = t[f"{attention}.o_proj.bias"]
        if family in ("qwen3_moe", "olmoe"):
            wanted[*at, "attention", "q_norm"] = t[f"{attention}.q_norm.weight"]
            wanted[*at, "attention", "k_norm"] = t[f"{attention}.k_norm.weight"]
        block = f"{layer}.block_sparse_moe" if family == "mixtral" else f"{layer}.mlp"
        gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        if family == "qwen2_moe" and i == 0:
            wanted[*at, "mlp", "gate_up"] = np.concatenate([t[f"{block}.{x}.weight"] for x in (gate, up)])
            wanted[*at, "mlp", "down"] = t[f"{block}.{down}.weight"]
            continue
        wanted[*at, "mlp", "router"] = t[f"{block}.gate.weight"]
        wanted[*at, "mlp", "gate_up"] = np.stack(
            [np.concatenate([t[f"{block}.experts.{j}.{x}.weight"] for x in (gate, up)]) for j in range(5)]
        )
        wanted[*at, "mlp", "down"] = np.stack([t[f"{block}.experts.{j}.{down}.weight"] for j in range(5)])
        if family == "qwen2_moe":
            shared = f"{block}.shared_expert"
            wanted[*at, "mlp", "shared_gate_up"] = np.concatenate([t[f"{shared}.{x}.weight"] for x in (gate, up)])
            wanted[*at, "mlp", "shared_down"] = t[f"{shared}.{down}.weight"]
            wanted[*at, "mlp", "shared_gate"] = t[f"{shared}_gate.weight"]
    got = arrays_of(module)
    assert set(got) == set(wanted)
    for path, array in wanted.items():
        np.testing.assert_array_equal(got[path], array, err_msg=str(path), strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_C90_both_layouts_load_to_the_same_arrays(family, tmp_path):
    raw = small_config(family)
    tensors = random_tensors(raw)
    per_expert, fused = tmp_path / "per_expert", tmp_path / "fused"
    write_folder(per_expert, raw, tensors)
    write_folder(fused, raw, fuse(tensors, raw))
    assert_same(load_module(per_expert)[1], load_module(fused)[1])
    assert inspect(per_expert).layouts == ("per_expert", "per_expert")
    assert inspect(fused).layouts == (("per_expert" if family == "qwen2_moe" else "fused"), "fused")


@pytest.mark.parametrize("experts", [12, 128])
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_C89_experts_are_ordered_by_number(family, experts, tmp_path):
    key = "num_local_experts" if family == "mixtral" else "num_experts"
    raw = small_config(family, **{key: experts}, num_hidden_layers=1)
    tensors = {}
    for name, shape in shapes(raw).items():
        number = int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else 0
        tensors[name] = np.full(shape, number, ml_dtypes.bfloat16)
    order = np.random.default_rng(0).permutation(list(tensors))
    shards = [list(map(str, part)) for part in np.array_split(order, 5)]
    _, module = load_module(write_folder(tmp_path, raw, tensors, shards))
    mlp = module.blocks[0].mlp
    numbers = np.arange(experts, dtype=np.float32)
    for stack in (mlp.gate_up, mlp.down):
        flat = np.asarray(stack[...], np.float32).reshape(experts, -1)
        np.testing.assert_array_equal(flat, np.broadcast_to(numbers[:, None], flat.shape))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("layers", "experts"), [(4, 4), (3, 5)])
def test_C99_layers_and_experts_keep_their_axes(layers, experts, fused, tmp_path):
    raw = small_config("olmoe", num_hidden_layers=layers, num_experts=experts)
    tensors = {}
    for name, shape in shapes(raw).items():
        parts = name.split(".")
        number = 10 * int(parts[2]) + int(parts[5]) if ".experts." in name else 0
        tensors[name] = np.full(shape, number, np.float32)
    folder = write_folder(tmp_path / "a", raw, fuse(tensors, raw) if fused else tensors)
    config, module = load_module(folder, dtype=jnp.float32)
    for i, block in enumerate(module.blocks):
        for stack in (block.mlp.gate_up[...], block.mlp.down[...]):
            assert stack.shape[0] == experts
            for j in range(experts):
                assert (np.asarray(stack[j]) == 10 * i + j).all()
    for layout in ("per_expert", "fused"):
        save_module(config, module, tmp_path / "b", layout=layout)
        assert_same(load_module(tmp_path / "b")[1], module)


@pytest.mark.parametrize(
    ("hidden", "inner", "experts"),
    [(64, 32, 4), (32, 32, 4), (16, 16, 16), (16, 8, 16)],
    ids=["2I=H", "I=H", "E=H=I", "E=H=2I"],
)
@pytest.mark.parametrize("fused", [False, True])
def test_C92_layout_comes_from_the_names_where_sizes_are_ambiguous(hidden, inner, experts, fused, tmp_path):
    raw = small_config(
        "qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, num_hidden_layers=1
    )
    raw |= {"torch_dtype": "float32", "norm_topk_prob": True}
    tensors = random_tensors(raw, dtype=np.float32)
    _, module = load_module(write_folder(tmp_path, raw, fuse(tensors, raw) if fused else tensors))
    x = np.random.default_rng(1).normal(size=(6, hidden)).astype(np.float32)
    # One expert after the other, in f64.
    logits = x.astype(np.float64) @ tensors["model.layers.0.mlp.gate.weight"].T
    wanted = np.zeros_like(logits, shape=x.shape)
    for row, scores in enumerate(np.exp(logits - logits.max(-1, keepdims=True))):
        best = np.argsort(-scores, kind="stable")[:2]
        for j in best:
            gate, up, down = (
                tensors[f"model.layers.0.mlp.experts.{j}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            g = gate @ x[row].astype(np.float64)
            wanted[row] += scores[j] / scores[best].sum() * (down @ (g / (1 + np.exp(-g)) * (up @ x[row])))
    np.testing.assert_allclose(module.blocks[0].mlp(jnp.asarray(x)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("chunk", [64, 384, 386, 4096, 4 << 20])
def test_C100_chunks_of_any_size_give_the_same_arrays(dtype, chunk, tmp_path, monkeypatch):
    raw = small_config("olmoe")  # an expert's matrix has 384 bytes in two-byte dtypes
    tensors = random_tensors(raw, dtype=dtype)
    folder = write_folder(tmp_path, raw, tensors)
    monkeypatch.setattr(load_file, "CHUNK", chunk)
    for asked in (jnp.bfloat16, jnp.float16, jnp.float32):
        _, module = load_module(folder, dtype=asked)
        mlp = module.blocks[1].mlp
        for j in range(5):
            ours = np.asarray(mlp.gate_up[j])
            for rows, name in ((ours[:12], "gate_proj"), (ours[12:], "up_proj")):
                theirs = tensors[f"model.layers.1.mlp.experts.{j}.{name}.weight"].astype(asked)
                assert rows.dtype == theirs.dtype
                assert rows.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("inner", [511, 512, 513])
def test_C100_bf16_experts_around_a_mebibyte(inner, tmp_path):
    """Compared with the safetensors package, which reads the file on its own."""
    raw = small_config("olmoe", num_hidden_layers=1, hidden_size=1024, intermediate_size=inner, num_experts=2)
    folder = write_folder(tmp_path, raw, random_tensors(raw))
    _, module = load_module(folder)
    theirs = safetensors.numpy.load_file(folder / "model.safetensors")
    for j in range(2):
        for rows, name in ((slice(inner), "gate_proj"), (slice(inner, None), "up_proj")):
            wanted = theirs[f"model.layers.0.mlp.experts.{j}.{name}.weight"]
            assert np.asarray(module.blocks[0].mlp.gate_up[j, rows]).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("asked", [None, "bfloat16", "float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_C102_every_tensor_has_the_dtype_asked_for(family, asked, tmp_path):
    raw = small_config(family)
    config, module = load_module(write_folder(tmp_path, raw, random_tensors(raw)), dtype=asked)
    wanted = asked or "bfloat16"
    assert {array.dtype.name for array in arrays_of(module).values()} == {wanted}
    assert config.dtype == wanted
    assert dict(config.sources)["dtype"] == ("argument of load" if asked else "config.json (torch_dtype)")


def test_dtype_of_the_config_wins_over_the_files_and_the_files_over_nothing(tmp_path):
    raw = small_config("olmoe")
    tensors = random_tensors(raw, dtype=np.float32)
    assert load_module(write_folder(tmp_path, raw, tensors))[0].dtype == "bfloat16"
    del raw["torch_dtype"]
    config, module = load_module(write_folder(tmp_path, raw, tensors))
    assert config.dtype == "float32"
    assert module.embed[...].dtype == jnp.float32
    assert dict(config.sources)["dtype"] == "the weight files"
    mixed = tensors | {"model.norm.weight": tensors["model.norm.weight"].astype(np.float16)}
    assert inspect(write_folder(tmp_path, raw, mixed)).dtypes == (("F16", 1), ("F32", len(tensors) - 1))
    assert load_module(tmp_path)[1].norm[...].dtype == jnp.float32
    with pytest.raises(InvalidArgument, match="dtype: got int8, wanted bfloat16 or float16 or float32"):
        load_module(tmp_path, dtype=jnp.int8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"path": path}, "path: got .*, wanted the path of a folder") for path in (None, 3, b"x", "")),
        *(({"device": value}, "device: got .*, wanted a jax.Device, a Sharding or None") for value in (3, "tpu", True)),
        *(({"progress": value}, "progress: got .*, wanted a function") for value in (3, "x", True)),
        *(({"strict": value}, "strict: got .*, wanted True or False") for value in (None, 3, "yes")),
        *(
            ({"dtype": value}, "dtype: got .*, wanted bfloat16 or float16 or float32")
            for value in ("foo", 3, "float64")
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_before_anything_is_read(options, message):
    with pytest.raises(InvalidArgument, match=message):
        load_module(**{"path": FIXTURES / "olmoe", **options})
    if "path" in options:
        with pytest.raises(InvalidArgument, match=message):
            inspect(**options)


MEMORY = """
import gc, json, sys
from moe_jax.checkpoint import load_module
import jax, jax.numpy as jnp

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

small, folder = sys.argv[1:]
load_module(small), load_module(small, dtype="float32")  # code and threads exist from now on
for dtype in (None, "float32"):
    gc.collect()
    before, peak = anonymous(), 0
    def progress(done, total):
        global peak
        peak = max(peak, anonymous())
    _, module = load_module(folder, dtype=dtype, progress=progress)
    peak = max(peak, anonymous())
    print(json.dumps([peak - before, module.embed[...].dtype.name]))
    del module
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_C102_peak_host_memory_of_a_load(tmp_path):
    raw = small_config("qwen3_moe", hidden_size=512, moe_intermediate_size=1024, num_experts=16, num_hidden_layers=4)
    tensors = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in shapes(raw).items()}
    names = list(tensors)
    write_folder(tmp_path / "large", raw, tensors, [names[: len(names) // 2], names[len(names) // 2 :]])
    size = sum(array.nbytes for array in tensors.values())
    assert size > 200e6
    small = small_config("qwen3_moe")
    write_folder(tmp_path / "small", small, random_tensors(small))
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    (own, own_dtype), (wide, wide_dtype) = map(json.loads, run.stdout.splitlines())
    # The arrays filled are the model's own: beyond it, one conversion buffer and small things.
    assert (own_dtype, wide_dtype) == ("bfloat16", "float32")
    assert own < 1.1 * size
    assert wide < 2 * size + 0.1 * size


def test_loaded_arrays_are_the_memory_that_was_read_into(tmp_path, monkeypatch):
    """On the CPU nothing is copied a second time."""
    given, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device: given.append(x) or put(x, device))
    raw = small_config("olmoe")
    _, module = load_module(write_folder(tmp_path, raw, random_tensors(raw)))
    pointers = {array.ctypes.data for array in given}
    assert pointers == {value.unsafe_buffer_pointer() for value in _values(module)}


def _values(module: Decoder) -> list[jax.Array]:
    return [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(module))]


def test_donating_a_loaded_array_leaves_the_others(tmp_path):
    raw = small_config("olmoe")
    _, module = load_module(write_folder(tmp_path, raw, random_tensors(raw)))
    before = np.array(module.blocks[0].mlp.down[...])
    jax.jit(lambda x: x * 2, donate_argnums=0)(module.embed[...])
    assert np.asarray(module.blocks[0].mlp.down[...]).tobytes() == before.tobytes()


def test_device(tmp_path):
    raw = small_config("olmoe")
    last = jax.devices()[-1]
    _, module = load_module(write_folder(tmp_path, raw, random_tensors(raw)), device=last)
    assert all(value.devices() == {last} for value in _values(module))


def test_progress_counts_bytes_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(load_file, "CHUNK", 100)
    raw = small_config("qwen2_moe")
    tensors = random_tensors(raw)
    seen: list[tuple[int, int]] = []
    load_module(write_folder(tmp_path, raw, tensors), dtype="float32", progress=lambda *now: seen.append(now))
    total = sum(array.nbytes for array in tensors.values())
    done = [count for count, _ in seen]
    assert {of for _, of in seen} == {total}
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)
    assert len(done) > total // 100


def test_tied_head(tmp_path):
    raw = small_config("qwen3_moe", tie_word_embeddings=True)
    tensors = random_tensors(raw)
    _, module = load_module(write_folder(tmp_path / "a", raw, tensors))
    assert module.head is None
    # A copy of the head is not loaded, and said to be there.
    copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_folder(tmp_path / "b", raw, copied)
    assert_same(load_module(tmp_path / "b")[1], module)
    assert inspect(tmp_path / "b").ignored == (("lm_head.weight", "copy of the tied embedding"),)
    # Or it is the only one, as transformers accepts too.
    del copied["model.embed_tokens.weight"]
    assert_same(load_module(write_folder(tmp_path / "c", raw, copied))[1], module)


def test_report(tmp_path):
    raw = small_config("olmoe")
    tensors = random_tensors(raw)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    report = inspect(write_folder(tmp_path, raw, tensors))
    assert report.config.family == "olmoe"
    assert (report.tensors, report.dtypes) == (len(tensors) - 1, (("BF16", len(tensors) - 1),))
    assert report.nbytes == sum(array.nbytes for array in tensors.values()) - 8
    ((name, why),) = report.ignored
    assert (name, why) == ("model.layers.0.self_attn.rotary_emb.inv_freq", "buffer that the config determines")
    load_module(tmp_path)


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("*/config.json")), ids=lambda file: file.parent.name)
def test_checkpoints_of_transformers_survive_load_and_save(folder, tmp_path):
    """Every tensor transformers wrote comes back under its name with its bits, whatever the layout between."""
    config, module = load_module(folder.parent)
    theirs = {
        name: array
        for file in folder.parent.glob("*.safetensors")
        for name, array in safetensors.numpy.load_file(file).items()
    }
    fused = any(name.endswith("experts.gate_up_proj") for name in theirs)
    save_module(config, module, tmp_path / "other", layout="per_expert" if fused else "fused")
    other = load_module(tmp_path / "other")
    assert other[0] == config
    save_module(*other, tmp_path / "same", layout="fused" if fused else "per_expert")
    ours = safetensors.numpy.load_file(tmp_path / "same" / "model.safetensors")
    if config.tie_embeddings:
        theirs.pop("lm_head.weight", None)
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name, strict=True)


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_is_the_identity(family, layout, tmp_path):
    raw = small_config(family, eos_token_id=[3, 4])
    config, module = load_module(write_folder(tmp_path / "a", raw, random_tensors(raw)))
    for shard_bytes, several in ((1 << 40, False), (1000, True), (3000, True)):
        folder = tmp_path / "b"
        save_module(config, module, folder, layout=layout, max_shard_bytes=shard_bytes)
        assert (folder / "model.safetensors.index.json").exists() == several
        assert (folder / "model.safetensors").exists() != several
        again, loaded = load_module(folder)
        assert again == config
        assert_same(loaded, module)
    # The files of earlier saves are gone, those of the last are as small as asked where a tensor allows it.
    largest = max(array.nbytes for array in arrays_of(module).values())
    for file in folder.glob("*.safetensors"):
        assert file.stat().st_size < max(3000, largest) + 9000
        safetensors.numpy.load_file(file)
    saved = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {file.name for file in folder.glob("*.safetensors")} == set(saved["weight_map"].values())
    assert saved["metadata"]["total_size"] == sum(array.nbytes for array in arrays_of(module).values())


def test_save_writes_the_dtype_that_the_parameters_have(tmp_path):
    raw = small_config("olmoe")
    config, module = load_module(write_folder(tmp_path / "a", raw, random_tensors(raw)))
    _, wide = load_module(tmp_path / "a", dtype="float32")
    save_module(config, wide, tmp_path / "b")
    assert inspect(tmp_path / "b").dtypes == (("F32", len(shapes(raw))),)
    assert load_module(tmp_path / "b")[0].dtype == "float32"
    assert_same(load_module(tmp_path / "b", dtype="bfloat16")[1], module)


def test_save_refuses_what_does_not_fit(tmp_path):
    raw = small_config("olmoe")
    config, module = load_module(write_folder(tmp_path / "a", raw, random_tensors(raw)))
    other = load_module(write_folder(tmp_path / "c", small_config("mixtral"), random_tensors(small_config("mixtral"))))
    with pytest.raises(InvalidArgument, match="layout: got 'x', wanted 'per_expert' or 'fused'"):
        save_module(config, module, tmp_path / "b", layout="x")
    with pytest.raises(InvalidArgument, match=r"parameters in one of module and config only: got .*k_norm"):
        save_module(other[0], module, tmp_path / "b")
    for options, message in (
        ({"config": None}, "type of config: got NoneType, wanted ModelConfig"),
        ({"module": 3}, "type of module: got int, wanted Module"),
        *(({"path": path}, "path: got .*, wanted the path of a folder") for path in (None, 3, b"x", [], "", "a\0b")),
        ({"layout": ["fused"]}, "layout: got"),
        *(
            ({"max_shard_bytes": n}, "max_shard_bytes: got .*, wanted an integer, 1 or more")
            for n in (None, "3", 3.0, 0)
        ),
        *(({"tokenizer": value}, "tokenizer: got .*, wanted a Tokenizer, 'kept' or None") for value in (3, "foo")),
    ):
        with pytest.raises(InvalidArgument, match=f"^save_module: {message}"):
            save_module(**{"config": config, "module": module, "path": tmp_path / "b", **options})
    module.embed.set_value(module.embed[...].T)  # as many elements, in another order
    with pytest.raises(InvalidArgument, match=r"parameter \('embed',\): got "):
        save_module(config, module, tmp_path / "b")
    assert not (tmp_path / "b").exists()
