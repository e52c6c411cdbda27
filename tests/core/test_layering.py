"""`core` imports only torch, keeps tensors on their device, and has all the names that it exports."""

import ast
import sys
from pathlib import Path

import flowgrpo.core

PARTS = ("parts.choice", "parts.needs", "parts.ranges", "parts.traits")


def test_core_imports_torch_and_the_words_of_parts_only():
    files = sorted(Path(flowgrpo.core.__file__).parent.glob("*.py"))
    assert {f.stem for f in files} >= {"advantages", "diagnostics", "objectives", "surrogates", "trees"}
    allowed = {"torch", *sys.stdlib_module_names}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom):
                # Level 1 stays inside core; level 2 reaches its siblings, of which all but `parts` sit above it.
                own = node.level == 1 or (node.level == 2 and node.module in PARTS)
                assert own or (node.level == 0 and node.module.split(".")[0] in allowed), file


def test_core_never_pulls_a_value_off_the_device():
    """`.item()` and its kin would synchronise once per metric and micro-batch."""
    for file in Path(flowgrpo.core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "cpu", "numpy")), file


def test_public_names_exist():
    for name in flowgrpo.core.__all__:
        assert callable(getattr(flowgrpo.core, name)) or name == "SURROGATES"
    assert flowgrpo.core.__all__ == sorted(flowgrpo.core.__all__)
