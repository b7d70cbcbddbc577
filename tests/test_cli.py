"""The command line, on a tiny model made here, on the shipped one, and on scripted output."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from flax import nnx

import moe_jax
from moe_jax import cli, doctor
from moe_jax.cli import decoding, description
from moe_jax.models.decoder import Decoder
from moe_jax.models.families import parse_config
from moe_jax.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def byte_tokenizer() -> Tokenizer:
    """One token for each byte: characters outside ASCII take several."""
    alphabet = {letter: index for index, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(fast)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = parse_config(CONFIG)
    moe_jax.Model(config, Decoder(config, rngs=nnx.Rngs(0)), byte_tokenizer()).save(folder)
    return folder


@pytest.fixture
def command(capfd, monkeypatch):
    """Runs the command in this process; gives exit code, stdout and stderr."""
    monkeypatch.setattr("warnings.showwarning", None)  # restored afterwards: the command sets its own

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return stopped.value.code or 0, out, err

    return run


def test_decode_without_a_terminal_prints_text_on_stdout_and_plain_lines_on_stderr(command, checkpoint):
    code, out, err = command("decode", "--model", checkpoint, "--prompt", "In the", "--max-new-tokens", 12)
    assert code == 0
    assert out.endswith("\n")
    assert len(out) > 1
    for line in (f"loading {checkpoint}", "compiling", "prompt: In the", "tokens: 6 in the prompt, 12 new"):
        assert line in err.splitlines()
    for start in ("device: cpu", "time to first token: ", "tokens/s: ", "compiled programs: 2 in "):
        assert any(line.startswith(start) for line in err.splitlines())
    assert "\033" not in out + err


def test_decode_json_is_one_object_on_stdout(command, checkpoint):
    code, out, err = command("decode", "--model", checkpoint, "--prompt", "é", "--max-new-tokens", 100, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["prompt"] == "é"
    assert len(result["tokens"]) == 100
    assert result["text"] == byte_tokenizer().decode(result["tokens"])
    assert result["counters"] == {"prompt_tokens": 2, "new_tokens": 100, "compiled_programs": 2}
    assert result["graphs"]["served_by"] == "jitted step: the model is on a cpu"
    assert result["graphs"]["direct"] == result["graphs"]["replayed"] == 0
    assert result["device"]["platform"] == "cpu"
    timings = result["timings"]
    assert timings["time_to_first_token_seconds"] > 0
    assert timings["compile_seconds"] > 0
    assert timings["tokens_per_second"] > 0
    assert err.splitlines() == [f"loading {checkpoint}", "compiling"]


def test_decode_on_an_engine_says_how_its_steps_ran(command, checkpoint):
    arguments = ("decode", "--model", checkpoint, "--prompt", "In the", "--max-new-tokens", 6)
    _, wanted, err = command(*arguments)
    assert "decoded by: jitted step: the model is on a cpu" in err.splitlines() and "graph steps" not in err
    code, out, err = command(*arguments, "--graphs", "simulate")
    assert (code, out) == (0, wanted)
    summary = {
        *('decoded by: engine: graphs "simulate"', "graph steps: 2 direct, 1 captured, 4 replayed"),
        "direct because: 1 prompt, 1 first call",
    }
    assert summary <= set(err.splitlines()) and "graph failures" not in err
    result = json.loads(command(*arguments, "--graphs", "simulate", "--json")[1])
    assert result["graphs"] == {
        **{"served_by": 'engine: graphs "simulate"', "direct": 2, "captured": 1, "updated": 0, "replayed": 4},
        **{"reasons": {"prompt": 1, "first call": 1}, "failures": {}},
    }
    assert f"{result['text']}\n" == wanted


def test_decode_says_which_graphs_failed():
    steps = decoding.Steps("engine", direct=3, replayed=1, reasons={"graph failed": 3}, failures={"instantiate": 2})
    assert decoding._graph_rows(steps) == [
        *(("graph steps", "3 direct, 1 replayed"), ("direct because", "3 graph failed")),
        ("graph failures", "2 instantiate"),
    ]


def scripted(monkeypatch, text: str, seen=lambda: None) -> list[tuple[list[list[int]], dict[str, object]]]:
    """Replaces the model by one that says a text byte by byte; gives the list of the calls of `generate`."""
    tokenizer, calls = byte_tokenizer(), []

    def generate(prompts, **options):
        calls.append((prompts.tolist(), options))
        for token in tokenizer.encode(text):
            seen()
            yield np.array([token], np.int32)

    stats = SimpleNamespace(misses=0, compile_seconds=0.0)
    model = SimpleNamespace(tokenizer=tokenizer, generate=generate, executables=SimpleNamespace(stats=lambda: stats))
    model.explain_generate, model.engine_stats = lambda: "a script", lambda: None
    monkeypatch.setattr(moe_jax, "load", lambda *_, **__: model, raising=False)
    return calls


def test_options_reach_the_model(command, monkeypatch):
    calls = scripted(monkeypatch, "x")
    command("decode", "--prompt", "abc")
    options = {"max_new_tokens": 16, "temperature": 0.9, "top_p": 0.8, "seed": 7, "graphs": "simulate"}
    command(*["decode", "--prompt", "abc"], *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()))
    ids = [byte_tokenizer().encode("abc")]
    defaults = {"max_new_tokens": 200, "temperature": 0.0, "top_p": 1.0, "seed": 0, "graphs": None}
    assert calls == [(ids, {**defaults, "stream": True}), (ids, {**options, "stream": True})]


def test_characters_of_several_tokens_come_whole(command, monkeypatch):
    text = "naïve – 東京 🙂 end"
    scripted(monkeypatch, text)
    code, out, _ = command("decode")
    assert code == 0
    assert out == text + "\n"


def test_text_is_written_as_it_comes(capfd, monkeypatch):
    so_far = []
    text = "aé🙂z"
    scripted(monkeypatch, text, seen=lambda: so_far.append(capfd.readouterr().out))
    monkeypatch.setattr("warnings.showwarning", None)
    with pytest.raises(SystemExit):
        cli.main(["decode"])
    # What came between two tokens: nothing while a character was incomplete.
    assert so_far == ["", "a", "", "é", "", "", "", "🙂"]
    assert capfd.readouterr().out == "z\n"


def test_an_incomplete_character_at_the_end_is_shown_as_replacement(command, monkeypatch):
    scripted(monkeypatch, "ok")
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer.encode("ok"), tokenizer.encode("é")[0]]
    model = moe_jax.load()
    model.generate = lambda *_, **__: (np.array([token], np.int32) for token in tokens)
    assert command("decode")[1] == "ok\ufffd\n"


def on_a_terminal(*arguments: object) -> tuple[int, str]:
    """Runs the command with stdout and stderr on a pseudo-terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_jax", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # how Linux reports that the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    return process.wait(timeout=120), b"".join(parts).decode()


def test_decode_on_a_terminal_draws_progress_and_a_table(checkpoint):
    code, shown = on_a_terminal("decode", "--model", checkpoint, "--prompt", "Once", "--max-new-tokens", 5)
    assert code == 0
    assert "\033[1mOnce\033[0m" in shown
    assert "compiling" in shown
    assert "─" in shown
    assert "tokens/s" in shown


def test_info_describes_a_checkpoint(command, checkpoint):
    code, out, _ = command("info", checkpoint, "--json")
    assert code == 0
    facts = json.loads(out)
    hidden, inner, heads, vocabulary = 32, 16, 8 * (4 + 2 * 2), 256
    attention = hidden * heads + 4 * 8 * hidden + 2 * 8 + 2 * hidden
    expert = 3 * hidden * inner
    parameters = vocabulary * hidden + hidden + 2 * attention + 3 * hidden * 48 + (8 * expert + 8 * hidden)
    wanted = {
        "family": "qwen3_moe",
        "layers": 2,
        "moe_layers": 1,
        "experts": 8,
        "top_k": 2,
        "dtype": "float32",
        "parameters": parameters,
        "bytes": 4 * parameters,
        "bytes_per_expert": 4 * expert,
        "slots_that_fit": 8,
    }
    assert {name: facts[name] for name in wanted} == wanted
    code, out, _ = command("info", checkpoint)
    assert code == 0
    assert "family: qwen3_moe" in out
    assert "experts: 8 in a layer, top-2 used" in out
    assert "slots that would fit: 8 of 8 experts in each layer" in out
    assert "available in the memory of this machine" in out


def test_info_takes_the_model_as_decode_does(command, checkpoint):
    found = [command("info", *path, "--json") for path in ([checkpoint], ["--model", checkpoint])]
    facts = [json.loads(out) | {"free_bytes": None} for _, out, _ in found]  # other programs use memory too
    assert facts[0] == facts[1] and facts[0]["family"] == "qwen3_moe"
    code, out, err = command("info", checkpoint, "--model", checkpoint)
    assert (code, out) == (2, "")
    assert err.startswith("error: moe-jax info: two checkpoints: got ") and "wanted one of the two" in err


@pytest.mark.parametrize(
    ("free", "slots"), [(10**9, 8), (1000 + 2 * 10 * 3, 3), (1000 + 2 * 10 * 3 - 1, 2), (999, 0), (0, 0)]
)
def test_slots_that_fit_leave_room_for_what_is_no_expert(free, slots):
    assert description.slots_that_fit(free, 1000 + 2 * 10 * 8, 10, 2, 8) == slots


def test_doctor_on_this_machine(command):
    code, out, _ = command("doctor", "--json")
    report = json.loads(out)
    assert code == (0 if report["ok"] else 1)
    assert report["machine"]["packages"]["jax"].startswith("0.11.")
    assert {operation["name"] for operation in report["operations"]} == {
        *("route", "grouped_moe, 1 row", "grouped_moe, 4096 rows"),
        *("linear", "route_rows", "kv_append", "attention", "sample"),
    }


def test_doctor_on_a_plain_cpu_machine_says_ok(command, monkeypatch):
    monkeypatch.setattr(doctor, "find_driver", lambda: None)
    code, out, _ = command("doctor")
    assert code == 0
    assert "NVIDIA driver: none" in out
    assert "operation grouped_moe, 4096 rows: reference (" in out
    assert out.splitlines()[-1].startswith("OK: no NVIDIA GPU here")


def test_C114_doctor_exits_1_with_the_remedy(command, monkeypatch):
    monkeypatch.setattr(doctor, "find_driver", lambda: "580.65.06")
    code, out, _ = command("doctor")
    assert code == 1
    assert "PROBLEM: NVIDIA driver 580.65.06 is present, but JAX" in out
    assert " REMEDY: " in out
    code, out, _ = command("doctor", "--json")
    assert code == 1
    assert json.loads(out)["problems"][0]["remedy"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["decode", "--model", "/no/such/folder"], 2, "/no/such/folder"),
        (["info", "/no/such/folder"], 2, "/no/such/folder"),
        (["decode", "--model", "../nothing"], 2, "no such folder: got '../nothing'"),
        (["decode", "--model", "{checkpoint}", "--max-new-tokens", "1000"], 2, "max_positions=128"),
        (["decode", "--model", "{empty}"], 1, "config.json"),
        (["info", "{empty}"], 1, "config.json"),
        (["decode", "--model", "{checkpoint}", "--prompt", ""], 2, "prompt"),
    ],
)
def test_errors_are_one_line_on_stderr(command, checkpoint, tmp_path, arguments, code, text):
    places = {"checkpoint": checkpoint, "empty": tmp_path}
    found, out, err = command(*(argument.format(**places) for argument in arguments))
    assert found == code
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert text in last
    assert "got" in last
    assert "wanted" in last
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--top-p", "2"], "top_p: got 2.0, wanted a number over 0, at most 1"),
        (["--top-p", "0"], "top_p: got 0.0"),
        (["--seed", "-1"], "seed: got -1, wanted an integer from 0 to 18446744073709551615"),
        (["--seed", str(2**64)], "seed: got an integer of 65 bits"),
        (["--seed", "abc"], "moe-jax decode: --seed: got 'abc', wanted an integer"),
        (["--top-p", "x"], "moe-jax decode: --top-p: got 'x', wanted a number"),
        (["--max-new-tokens", "0"], "moe-jax decode: --max-new-tokens: got 0, wanted an integer, 1 or more"),
        (["--max-new-tokens", "1.5"], "moe-jax decode: --max-new-tokens: got '1.5', wanted an integer"),
        (["--temperature", "nan"], "temperature: got nan, wanted a finite number, 0 or more"),
        (["--temperature", "-1"], "temperature: got -1.0, wanted a finite number, 0 or more"),
        (["--temperature", "inf"], "temperature: got inf, wanted a finite number"),
        (["--graphs", "on"], "--graphs: device: got 'on' on a cpu, wanted a CUDA device, or simulate or jit"),
        (["--graphs", "off", "--device", "cpu"], "--graphs: device: got 'off' on a cpu"),
        (["--graphs", "strict", "--json"], "--graphs: device: got 'strict' on a cpu"),
    ],
)
def test_options_are_refused_before_the_model_is_loaded(command, monkeypatch, options, text):
    monkeypatch.setattr(moe_jax, "load", lambda *_, **__: pytest.fail("loaded"), raising=False)
    code, out, err = command("decode", *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ") and text in line


def test_cuda_without_a_gpu_is_a_clear_error(command, monkeypatch):
    monkeypatch.setattr(doctor, "find_driver", lambda: None)
    code, out, err = command("decode", "--device", "cuda")
    assert (code, out) == (1, "")
    assert err.startswith("error: --device cuda: no usable GPU: got no NVIDIA driver on this machine")
    assert "--device cpu" in err


@pytest.mark.parametrize(
    "arguments", [["decode", "--bogus"], ["decode", "--device", "tpu"], ["decode", "--graphs", "yes"], ["sing"]]
)
def test_usage_errors_exit_2(command, arguments):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_version_and_help(command):
    assert command("--version")[:2] == (0, f"{moe_jax.__version__}\n")
    code, out, _ = command("--help")
    assert code == 0
    for name in ("decode", "info", "doctor"):
        assert name in out


def test_an_unsupported_jax_stops_the_command_with_one_line():
    code = (
        "import sys, jax\n"
        "jax.__version_info__, jax.__version__ = (0, 12, 0), '0.12.0'\n"
        "sys.argv = ['/usr/bin/moe-jax', 'doctor']\n"
        "import moe_jax\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert done.stderr.startswith("error: moe_jax: version of JAX: got 0.12.0, wanted JAX >=0.11.2,<0.12")


def test_the_reader_may_leave_early():
    command = f'"{sys.executable}" -m moe_jax doctor | true'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""


def test_the_shipped_model_continues_the_default_prompt(command):
    code, out, _ = command("decode", "--max-new-tokens", 20, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["prompt"] == cli.DEFAULT_PROMPT
    assert len(result["text"].split()) > 2
    code, out, _ = command("info", "--json")
    assert code == 0
    assert json.loads(out)["bytes"] < 12e6


@pytest.mark.gpu
def test_decode_on_the_gpu(command, checkpoint):
    code, out, _ = command("decode", "--model", checkpoint, "--device", "cuda", "--max-new-tokens", 9, "--json")
    assert code == 0
    assert json.loads(out)["device"]["platform"] == "gpu"
