"""The Python examples of the README run, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_examples_of_the_readme_run(capsys):
    text = README.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 3
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        # Empty lines first, so that a traceback shows the README's own line numbers.
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block[1], str(README), "exec"), names)
    assert "grouped_moe: reference" in capsys.readouterr().out


def test_links_of_the_documents_lead_somewhere():
    for document in (README, *sorted((README.parent / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
