"""The Python examples of the documents run, those of one document in order as one program, and their links lead
somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(document: Path) -> int:
    """Run the examples of a document; how many there are."""
    text = document.read_text()
    blocks = list(BLOCK.finditer(text))
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks:
        # Empty lines first, so that a traceback shows the document's own line numbers.
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block[1], str(document), "exec"), names)
    return len(blocks)


def test_python_examples_of_the_readme_run(capsys):
    pytest.importorskip("triton")  # for the engine's example
    assert run(README) >= 3
    said = capsys.readouterr().out
    assert "grouped_moe: reference" in said
    assert "replay: 2 rows in a bucket of 2" in said


@pytest.mark.parametrize(
    ("name", "needs", "said"),
    [
        ("engine.md", "triton", "replay: 2 rows in a bucket of 2"),
        ("planned-jit.md", "flax", "reused: the fingerprint is equal"),
    ],
)
def test_python_examples_of_the_other_documents_run(name, needs, said, capsys):
    pytest.importorskip(needs)
    assert run(ROOT / "docs" / name) >= 1
    assert said in capsys.readouterr().out


def test_no_other_document_has_examples():
    assert [path.name for path in DOCUMENTS if BLOCK.search(path.read_text())] == [
        *("README.md", "engine.md", "planned-jit.md"),
    ]


def anchors(document: Path) -> set[str]:
    """Names of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_the_documents_lead_somewhere(document):
    for path, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text()):
        if "://" in path:
            continue
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name}: {path}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {path}#{anchor}"
