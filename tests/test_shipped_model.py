"""The model that ships with the package is the one its record describes, and the script that made it still runs."""

from __future__ import annotations

import hashlib
import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import moe_jax

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "moe_jax/assets/tiny_moe"
RECORD = ROOT / "benchmarks/results/tiny_moe.json"
SCRIPT = ROOT / "benchmarks/train_tiny.py"
MOST_BITS_PER_BYTE = 2.2

# From chapters of the test part, by their place in the book from 0 (Genesis 18 and Nehemiah 5).
HELD_OUT = {
    17: """\
And the LORD appeared unto him in the plains of Mamre: and he sat in the tent door in the heat of the day;
And he lift up his eyes and looked, and, lo, three men stood by him: and when he saw them, he ran to meet them \
from the tent door, and bowed himself toward the ground,
And said, My LORD, if now I have found favour in thy sight, pass not away, I pray thee, from thy servant:
Let a little water, I pray you, be fetched, and wash your feet, and rest yourselves under the tree:
""",
    417: """\
And there was a great cry of the people and of their wives against their brethren the Jews.
For there were that said, We, our sons, and our daughters, are many: therefore we take up corn for them, that we \
may eat, and live.
Some also there were that said, We have mortgaged our lands, vineyards, and houses, that we might buy corn, because \
of the dearth.
""",
}


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def script() -> dict:
    """The names of the training script, without running it."""
    return runpy.run_path(str(SCRIPT))


def test_the_shipped_model_is_the_recorded_one(record):
    assert hashlib.sha256((SHIPPED / "model.safetensors").read_bytes()).hexdigest() == record["model_sha256"]
    assert record["test_bits_per_byte"] <= MOST_BITS_PER_BYTE
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 12e6


def test_the_command_given_in_the_script_is_the_recorded_one(record, script):
    words = script["__doc__"].split()
    for name in ("steps", "minutes", "evaluate_every"):
        given = words[words.index(f"--{name.replace('_', '-')}") + 1]
        assert float(given) == record["arguments"][name]


def test_the_passages_are_of_chapters_that_were_held_out(script):
    _, _, test = script["split_chapters"]("\n\n".join(map(str, range(1189))))
    assert {f"{number}\n" for number in HELD_OUT} <= set(test)


def test_bits_per_byte_of_held_out_passages():
    """Over each passage by itself; a byte model that knows only how often each letter occurs needs above 4."""
    model = moe_jax.load()
    assert model.tokenizer is not None
    nats, size = 0.0, 0
    for passage in HELD_OUT.values():
        ids = np.array(model.tokenizer.encode(passage))
        assert ids[0] == model.config.bos_token_id
        assert model.tokenizer.decode(ids) == passage
        logits = np.asarray(model(ids[None]))[0, :-1].astype(np.float64)
        likelihood = logits[np.arange(len(ids) - 1), ids[1:]] - np.logaddexp.reduce(logits, axis=-1)
        nats -= likelihood.sum()
        size += len(passage.encode())
    assert nats / math.log(2) / size <= MOST_BITS_PER_BYTE


@pytest.mark.slow
def test_the_training_script_runs(tmp_path, monkeypatch, script):
    words = np.array(HELD_OUT[17].split())
    random = np.random.default_rng(0)
    chapters = ["\n".join(" ".join(random.choice(words, 8)) for _ in range(6)) for _ in range(20)]
    text, out, result = tmp_path / "text.txt", tmp_path / "model", tmp_path / "record.json"
    text.write_text("\n\n".join(chapters))
    options = {"text": text, "out": out, "record": result, "steps": 2, "batch": 2, "length": 32, "vocab": 300}
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *(f"--{name}={value}" for name, value in options.items())])
    script["main"]()
    written = json.loads(result.read_text())
    assert written["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert written["model_sha256"] == hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert set(written) == set(json.loads(RECORD.read_text()))
    assert [point["step"] for point in written["curve"]] == [2]
    assert 1 < written["test_bits_per_byte"] < 10
    assert moe_jax.load(out).config.vocab_size == 300
