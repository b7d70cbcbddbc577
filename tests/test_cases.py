"""The table of failure cases names every test that carries a case, and no test that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs/cases.md"
PARTS = (
    *("with kernels", "with device graphs", "with the expert cache", "with quantised experts"),
    *("with speculative decoding", "with expert parallelism", "with tuning"),
)


def table() -> dict[str, tuple[list[str], str]]:
    """Tests, and what is to come, by case."""
    rows: dict[str, tuple[list[str], str]] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("| C"):
            case, _, tests, to_come = (cell.strip() for cell in line.strip("|").split("|"))
            assert case not in rows, f"{case} stands there twice"
            rows[case] = re.findall(r"`(\w+)`", tests), to_come
    return rows


def names() -> set[str]:
    trees = [ast.parse(file.read_text()) for file in TESTS.rglob("*.py")]
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_has_a_test_or_the_part_that_brings_it():
    rows = table()
    assert len(rows) == 79
    for case, (tests, to_come) in rows.items():
        assert tests or to_come, case
        assert to_come in ("", "not offered") or set(to_come.split(", ")) <= set(PARTS), f"{case}: {to_come}"


def test_the_table_and_the_tests_name_each_other():
    listed = {(case, name) for case, (tests, _) in table().items() for name in tests}
    known = names()
    carried = {(found[1], name) for name in known if (found := re.match(r"test_(C\d+)_", name))}
    assert sorted(carried - listed) == [], "tests that docs/cases.md does not name"
    assert sorted(name for _, name in listed if name not in known) == [], "named in docs/cases.md, not in tests/"
