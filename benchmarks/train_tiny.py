"""Train the small model that ships with the package, with the package's own differentiable op.

    benchmarks/kjv_text.sh kjv.txt
    python benchmarks/train_tiny.py --text kjv.txt --out moe_jax/assets/tiny_moe \\
        --record benchmarks/results/tiny_moe.json --steps 1826 --minutes 5.2 --evaluate-every 100

is the command of the recorded run, which trained for 140 s on one H200.

A Qwen3-MoE-shaped byte-level BPE language model. Chapters are dealt into three parts: 90 % to train on,
5 % to decide when to stop, and 5 % that nothing is chosen by, on which the reported bits per byte are
measured with the weights as saved (bf16).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import moe_jax
from moe_jax import Activation, ModelConfig, MoEConfig, RopeConfig, RouterConfig
from moe_jax.checkpoint import load_module, save_module
from moe_jax.losses import load_balancing_loss
from moe_jax.models.attention import rms_norm
from moe_jax.models.decoder import Decoder
from moe_jax.models.rope import rotation

END = "<|endoftext|>"
ROUTER_LOSS = 0.01  # weight of the load-balancing loss, as in the Switch Transformer


def model_config(vocab_size: int) -> ModelConfig:
    """5.3 M parameters, 1.7 M of them active per token."""
    layers = 5
    router = RouterConfig(experts=16, top_k=4, renormalize=True)
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=vocab_size,
        hidden_size=192,
        layers=layers,
        heads=6,
        kv_heads=2,
        head_dim=32,
        moe=MoEConfig(router=router, activation=Activation(name="swiglu", layout="halves")),
        moe_intermediate=96,
        moe_layers=(True,) * layers,
        qk_norm="head",
        tie_embeddings=True,
        rope=RopeConfig(theta=10000.0),
        windows=(None,) * layers,
        max_positions=2048,
        dtype="float32",
        bos_token_id=0,
        eos_token_ids=(0,),
        pad_token_id=0,
    )


def split_chapters(text: str) -> tuple[list[str], list[str], list[str]]:
    """Train, validation and test chapters: every 20th chapter, from the 7th and from the 17th, is held out."""
    chapters = [chapter.strip() + "\n" for chapter in text.split("\n\n") if chapter.strip()]
    validation, test = chapters[7::20], chapters[17::20]
    train = [c for i, c in enumerate(chapters) if i % 20 not in (7, 17)]
    return train, validation, test


def train_tokenizer(chapters: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[str]) -> np.ndarray:
    """One stream of token ids, each chapter preceded by the end-of-text token."""
    return np.concatenate([np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(chapters)])


def batches(stream: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Random windows of ``length + 1`` tokens, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(stream) - length - 1, batch)
        yield np.stack([stream[s : s + length + 1] for s in starts])


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def forward(module: Decoder, tokens: jax.Array, rate: float, key: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """`Decoder.__call__` with dropout behind each block's two halves, and the router logits of each layer."""
    config = module.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    angles = rotation(config.rope, config.head_dim, positions)
    x = jnp.take(module.embed[...], tokens, axis=0)
    router_logits = []
    for block, block_key in zip(module.blocks, jax.random.split(key, config.layers), strict=True):
        attention_key, mlp_key = jax.random.split(block_key)
        mixed, _ = block.attention(rms_norm(x, block.attention_norm[...], block.eps), positions, angles)
        x = x + dropout(mixed, rate, attention_key)
        normed = rms_norm(x, block.mlp_norm[...], block.eps)
        router_logits.append(block.mlp.router_logits(normed))
        x = x + dropout(block.mlp(normed), rate, mlp_key)
    return module.logits(x), router_logits


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def bits_per_byte(module: Decoder, stream: np.ndarray, text_bytes: int, length: int) -> float:
    """Negative log2 likelihood of a held-out stream over its bytes; each window starts without context."""
    windows = -(-(len(stream) - 1) // length)
    padded = np.pad(stream, (0, windows * length + 1 - len(stream)))
    inputs, targets = padded[:-1].reshape(windows, length), padded[1:].reshape(windows, length)
    # The end-of-text tokens between chapters stand for no bytes, but guessing them is part of the task.
    counted = (np.arange(windows * length) < len(stream) - 1).reshape(windows, length)
    graph, state = nnx.split(module)

    @jax.jit
    def nats(state, inputs, targets, counted):
        logits = nnx.merge(graph, state)(inputs)
        return jnp.sum(jnp.where(counted, cross_entropy(logits, targets), 0.0))

    total = sum(
        float(nats(state, inputs[i : i + 8], targets[i : i + 8], counted[i : i + 8])) for i in range(0, windows, 8)
    )
    return total / math.log(2) / text_bytes


def train(args: argparse.Namespace, console: Console) -> None:
    started = time.monotonic()
    train_text, validation_text, test_text = split_chapters(args.text.read_text())
    tokenizer = train_tokenizer(train_text, args.vocab)
    stream, validation, test = (encode(tokenizer, part) for part in (train_text, validation_text, test_text))
    sizes = {"validation": len("".join(validation_text).encode()), "test": len("".join(test_text).encode())}
    config = model_config(tokenizer.get_vocab_size())
    module = Decoder(config, rngs=nnx.Rngs(args.seed))
    graph, state = nnx.split(module)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state))
    console.print(f"{parameters:,} parameters, {len(stream):,} training tokens, {jax.devices()[0].device_kind}")

    # Matrices decay, norms do not.
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, args.steps // 50, args.steps, args.rate / 20)
    decays = jax.tree.map(lambda leaf: leaf.ndim > 1, state)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=args.decay, mask=decays)
    )
    moments = optimizer.init(state)

    def loss_of(state, tokens, key):
        logits, router_logits = forward(nnx.merge(graph, state), tokens[:, :-1], args.dropout, key)
        language = jnp.mean(cross_entropy(logits, tokens[:, 1:]))
        balance = load_balancing_loss(router_logits, config.moe.router.top_k)
        return language + ROUTER_LOSS * balance, (language, balance)

    @jax.jit(donate_argnums=(0, 1))
    def step(state, moments, tokens, key):
        grads, (language, balance) = jax.grad(loss_of, has_aux=True)(state, tokens, key)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(grads, moments, state)
        return optax.apply_updates(state, updates), moments, language, balance

    data = batches(stream, args.batch, args.length, args.seed)
    key = jax.random.key(args.seed)
    curve: list[dict[str, float]] = []
    best, best_state = math.inf, state
    for number in range(1, args.steps + 1):
        state, moments, language, balance = step(state, moments, next(data), jax.random.fold_in(key, number))
        out_of_time = time.monotonic() - started > args.minutes * 60
        if number % args.evaluate_every and number < args.steps and not out_of_time:
            continue
        held_out = bits_per_byte(nnx.merge(graph, state), validation, sizes["validation"], args.length)
        seconds = time.monotonic() - started
        curve.append(
            {
                "step": number,
                "train_nats_per_token": float(language),
                "router_balance": float(balance),
                "validation_bits_per_byte": held_out,
                "seconds": round(seconds, 1),
            }
        )
        console.print(
            f"step {number:5d}/{args.steps}  train {float(language):.3f} nats/token  balance {float(balance):.2f}  "
            f"validation {held_out:.3f} bits/byte  {seconds:.0f} s"
        )
        if held_out < best:
            best, best_state = held_out, jax.tree.map(jnp.copy, state)
        if out_of_time:
            console.print(f"stopped after {args.minutes} minutes")
            break

    save(args.out, config, nnx.merge(graph, best_state), tokenizer)
    _, shipped = load_module(args.out)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {"moe_jax": moe_jax.__version__, "jax": jax.__version__, "optax": optax.__version__},
        "arguments": {name: value for name, value in vars(args).items() if not isinstance(value, Path)},
        "text_sha256": sha256(args.text),
        "model_sha256": sha256(args.out / "model.safetensors"),
        "parameters": parameters,
        "train_tokens": len(stream),
        "train_bytes": len("".join(train_text).encode()),
        "test_bytes": sizes["test"],
        "test_bits_per_byte": bits_per_byte(shipped, test, sizes["test"], args.length),
        "validation_bits_per_byte": bits_per_byte(shipped, validation, sizes["validation"], args.length),
        "curve": curve,
    }
    args.record.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"test {result['test_bits_per_byte']:.3f} bits/byte as saved in {args.out}")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def save(out: Path, config: ModelConfig, module: Decoder, tokenizer: Tokenizer) -> None:
    """The checkpoint in bf16 and the tokenizer, as Hugging Face lays them out."""
    graph, state = nnx.split(module)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    save_module(replace(config, dtype="bfloat16"), nnx.merge(graph, rounded), out)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": END, "eos_token": END, "pad_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text, chapters separated by blank lines")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint to write")
    parser.add_argument("--record", type=Path, required=True, help="JSON file for the loss curve and the result")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop training after this long")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args(), Console())


if __name__ == "__main__":
    main()
