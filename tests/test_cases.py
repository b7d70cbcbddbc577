"""The table of failure cases names every test that carries a case, and no test that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs/cases.md"
PARTS = {"expert cache", "expert parallelism", "quantised experts", "speculative decoding", "weights on the input"}


def table() -> dict[str, tuple[list[str], str]]:
    """Tests of each case, and what of it this version does not offer."""
    rows: dict[str, tuple[list[str], str]] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("| C"):
            case, _, tests, missing = (cell.strip() for cell in line.strip("|").split("|"))
            assert case not in rows, f"{case} stands there twice"
            rows[case] = re.findall(r"`(\w+)`", tests), missing
    return rows


def names() -> set[str]:
    trees = [ast.parse(file.read_text()) for file in TESTS.rglob("*.py")]
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_has_a_test_or_is_about_what_is_not_offered():
    rows = table()
    assert len(rows) == 79
    for case, (tests, missing) in rows.items():
        assert tests or missing, case
        assert not missing or set(missing.split(", ")) <= PARTS, f"{case}: {missing}"


def test_the_table_and_the_tests_name_each_other():
    listed = {(case, name) for case, (tests, _) in table().items() for name in tests}
    known = names()
    carried = {(found[1], name) for name in known if (found := re.match(r"test_(C\d+)_", name))}
    assert sorted(carried - listed) == [], "tests that docs/cases.md does not name"
    assert sorted(name for _, name in listed if name not in known) == [], "named in docs/cases.md, not in tests/"
