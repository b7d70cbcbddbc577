"""Every refusal of the package says what it got and what it wanted (C117)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe_jax", "pallas_kernels", "cache")
BASE = "MoeJaxError"

# Raises that are no refusal of ours, by file and what they raise, each with its reason.
ALLOWED = {
    ("moe_jax/__init__.py", "AttributeError"): "what Python expects of a module's __getattr__",
    ("cache/__init__.py", "AttributeError"): "what Python expects of a module's __getattr__",
    ("moe_jax/__init__.py", "SystemExit"): "the command stops with the text of an UnsupportedVersion",
    ("moe_jax/cli/__init__.py", "typer.Exit"): "how a typer command ends early",
    ("moe_jax/tokenizer.py", "TemplateError"): "what chat templates expect of raise_exception; caught by the caller",
    ("moe_jax/checkpoint/files.py", "ValueError"): "inside a JSON hook; caught by the caller and wrapped",
    ("moe_jax/checkpoint/load.py", "AssertionError"): "a fault of this package, which no argument can cause",
}


def files() -> list[Path]:
    """Python files of the three folders where they really stand (a link would show each twice)."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def error_classes() -> set[str]:
    """The base error and every class derived from it, by name."""
    known, bases = {BASE}, {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while new := {name for name, parents in bases.items() if parents & known} - known:
        known |= new
    return known


def makers(tree: ast.AST, errors: set[str]) -> set[str]:
    """Functions of a file that return one of the errors: their calls carry got and wanted on."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Name)
        and node.returns.id in errors
        and any(isinstance(part, ast.Return) for part in ast.walk(node))
    }


def complaints(path: Path, text: str, errors: set[str], everyones_makers: set[str]) -> list[str]:
    """What is wrong with the raises of one file."""
    tree, found = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in errors:
            keywords = {keyword.arg for keyword in node.keywords}
            if not {"got", "wanted", "where"} <= keywords:
                found.append(f"{relative(path)}:{node.lineno}: {name_of(node.func)} without where, got and wanted")
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        call = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = name_of(call)
        if (relative(path), ast.unparse(call)) in ALLOWED or name in everyones_makers:
            continue
        if name not in errors or not isinstance(node.exc, ast.Call):
            found.append(f"{relative(path)}:{node.lineno}: raises {ast.unparse(call)}")
    return found


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


ERRORS = error_classes()
MAKERS = {name for path in files() for name in makers(ast.parse(path.read_text()), ERRORS)}


@pytest.mark.parametrize("path", files(), ids=relative)
def test_C117_every_refusal_gives_got_and_wanted(path):
    assert complaints(path, path.read_text(), ERRORS, MAKERS) == []


@pytest.mark.parametrize("path", files(), ids=relative)
def test_C117_no_bare_assertion_checks_an_argument(path):
    """An assert is no refusal: it has no text for the user and disappears under ``python -O``."""
    assert bare_assertions(path.read_text()) == []


def bare_assertions(text: str) -> list[str]:
    """Asserts without a text, but for those that tell the type checker that something is not None."""

    def narrows(test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp):
            return all(narrows(part) for part in test.values)
        return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)

    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]
    return [ast.unparse(node) for node in nodes if node.msg is None and not narrows(node.test)]


def test_the_scan_of_assertions():
    assert bare_assertions("assert x % 128 == 0\nassert x is not None\nassert x > 0, 'text'") == ["assert x % 128 == 0"]


def test_the_scan_sees_all_three_folders_and_the_errors():
    assert {path.relative_to(ROOT).parts[0] for path in files()} == set(FOLDERS)
    assert {"InvalidArgument", "CannotServe", "CheckpointError", "UnsupportedVersion"} <= ERRORS


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('x')",
        "raise InvalidArgument('x', where='y', got=1)",
        "raise InvalidArgument",
        "e = InvalidArgument('x', where='y', got=1)\nraise e",
        "raise KeyError",
    ],
)
def test_the_scan_finds_planted_faults(text):
    assert complaints(ROOT / "moe_jax/planted.py", text, ERRORS, MAKERS)


@pytest.mark.parametrize(
    "text", ["try:\n    f()\nexcept OSError:\n    raise", "raise CannotServe('x', where='', got=1, wanted=2)"]
)
def test_the_scan_accepts_what_is_right(text):
    assert complaints(ROOT / "moe_jax/planted.py", text, ERRORS, MAKERS) == []


def test_every_exception_on_the_list_is_still_there():
    raised = {
        (relative(path), ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc))
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and node.exc is not None
    }
    assert set(ALLOWED) <= raised
