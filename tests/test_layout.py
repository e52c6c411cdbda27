"""The package's parts depend on each other in one direction only; its links and its light imports are as documented."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flowgrpo

PACKAGE = Path(flowgrpo.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "flowgrpo"


def table() -> dict[str, set[str]]:
    """The other rooms that each room may import, from the table of docs/architecture.md."""
    text = (
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Layout")[2].partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows if len(row) == 3}


ALLOWED: dict[str, set[str]] = {"": set(), "__main__": {"cli"}, **table()}
# Parts whose third-party imports are fixed as well.
PACKAGES = {
    "parts": {"pydantic", "pydantic_core"},
    "core": {"torch"},
    "intake": set(),
    "media": {"PIL", "av", "numpy"},
    "votes": set(),
    "samplers": {"torch"},
    "configs": {"pydantic", "pydantic_core", "yaml"},
    "gallery": {"PIL", "yaml"},
}


def part_of(path: Path) -> str:
    """`core` for flowgrpo/core/trees.py, nothing for flowgrpo/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path, text: str) -> tuple[set[str], set[str]]:
    """The parts of the package and the outside packages that a file imports, at any depth of its code."""
    parents = ("flowgrpo", *path.relative_to(PACKAGE).parts[:-1])
    modules: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(parents[: len(parents) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # In `from . import core`, only the imported name names the part.
            modules += [".".join([*base, alias.name]) for alias in node.names]
    inside = {name.split(".")[1] for name in modules if name.startswith("flowgrpo.")}
    outside = {name.split(".")[0] for name in modules} - {"flowgrpo"} - set(sys.stdlib_module_names)
    return inside, outside


def faults(path: Path, text: str) -> list[str]:
    part = part_of(path)
    inside, outside = imports(path, text)
    found = [f"{path.name}: {part} imports {other}" for other in sorted(inside - {part} - ALLOWED[part])]
    if part in PACKAGES:
        found += [f"{path.name}: {part} imports {other}" for other in sorted(outside - PACKAGES[part])]
    return found


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_dependencies_point_one_way():
    files = sources()
    counted = Counter(part_of(path) for path in files)
    assert set(counted) <= set(ALLOWED), "a new room needs its row in the table"
    assert sum(counted.values()) >= 300
    assert [fault for path in files for fault in faults(path, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("file", "line", "seen"),
    [
        ("core/new.py", "import numpy", True),
        ("core/new.py", "from ..samplers.kernels import step", True),
        ("core/new.py", "def f():\n    from .. import training", True),
        ("samplers/new.py", "import diffusers", True),
        ("samplers/new.py", "from flowgrpo.pipelines import denoiser", True),
        ("rewards/new.py", "from ..training.data import read_prompts", True),
        ("rewards/deep/new.py", "from ...samplers import plans", True),
        ("gallery/new.py", "from ..training.run_folder import write_text", True),
        ("training/new.py", "from ..gallery.build import build_gallery", True),
        ("training/new.py", "from ..cli import app", True),
        ("training/new.py", "from ..bench.measures import Silent", True),
        ("training/deep/new.py", "from ...inference.opening import open_model", True),
        ("training/new.py", "from ..kit.check import check_reward", True),
        ("kit/new.py", "from ..text.model import load_language_model", True),
        ("configs/new.py", "from ..core import trees", True),
        ("rewards/new.py", "from ..worlds.scenes.draw import mask", True),
        ("rewards/new.py", "from ..parts import plugins\nfrom .base import Reward\nimport scipy", False),
        ("core/new.py", "import math\nfrom torch import Tensor\nfrom .trees import Tree", False),
        ("cli/app.py", "from ..gallery.build import build_gallery\nfrom .. import configs", False),
    ],
)
def test_the_rule_sees_each_way_of_writing_an_import(file: str, line: str, seen: bool):
    assert bool(faults(PACKAGE / file, line)) == seen


def modules_imported(path: Path) -> set[str]:
    """The modules of the package that a file imports when it runs; imports under `if TYPE_CHECKING` do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    known = {".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in sources()}
    parents = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*parents[: len(parents) - node.level + 1], *(node.module.split(".") if node.module else [])]
            names = {".".join([*base, alias.name]) for alias in node.names} | {".".join(base)}
            found |= names & known
    return found


def test_no_module_imports_itself_through_others():
    graph = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): modules_imported(p) for p in sources()}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_no_name_of_a_file_or_a_class_stands_for_two_things():
    files, classes = defaultdict(set), defaultdict(set)
    for path in sources():
        if path.name not in ("__init__.py", "__main__.py"):
            files[path.name].add(path)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(path)
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}


def test_the_package_imports_itself_by_relative_imports_only():
    """An absolute import through a root link would make every class twice."""
    absolute = [
        path.name
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "flowgrpo" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "flowgrpo")
    ]
    assert absolute == []


@pytest.mark.parametrize("name", ["rewards", "samplers", "pipelines", "configs"])
def test_the_root_shows_the_named_parts_as_relative_links(name: str):
    link = ROOT / name
    if (ROOT / "PKG-INFO").is_file():
        assert not link.exists(), "a source archive would hold what the link leads to twice"
        return
    assert link.is_symlink()
    assert Path(link.readlink()) == Path("flowgrpo") / name
    assert link.resolve() == SOURCE / name


def test_tests_are_where_what_they_test_is_and_say_what_that_is():
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(SOURCE).parts[0] for path in SOURCE.glob("*/*.py")}
    assert {name for name in folders if not list((tests / name).glob("test_*.py"))} == set()
    files = [*tests.rglob("test_*.py")]
    assert len(files) > 150
    silent = [path for path in files if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None]
    assert silent == []


def test_every_data_file_is_in_the_wheel():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"\[tool\.setuptools\.package-data\]\s*flowgrpo = (\[.*?\])", text, re.DOTALL)
    assert listed is not None
    shipped = {path for pattern in ast.literal_eval(listed[1]) for path in SOURCE.glob(pattern) if path.is_file()}
    there = {
        path
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert len(there) >= 7
    assert {str(path.relative_to(SOURCE)) for path in there - shipped} == set()
    assert [path for path in there if not (PACKAGE / path.relative_to(SOURCE)).is_file()] == []


@pytest.mark.slow
def test_importing_the_package_and_its_command_loads_no_tensor_library():
    heavy = {"torch", "numpy", "diffusers", "transformers", "pydantic"}
    parts = "bench cli configs estimate gallery inference pipelines rewards samplers training votes weights worlds"
    code = f"import sys, flowgrpo, {', '.join(f'flowgrpo.{p}' for p in parts.split())}\n"
    code += f"print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_recipe_is_read_without_the_libraries_of_models():
    code = (
        "import sys\n"
        "from flowgrpo.configs.load import load_recipe\n"
        "recipes = [load_recipe(name) for name in ('default', 'text', 'masked')]\n"
        "print([m for m in ('peft', 'diffusers', 'transformers') if m in sys.modules])\n"
        "from flowgrpo.training.checking import check\n"
        "for recipe in recipes[1:]: check(recipe).require()\n"
        "print([m for m in ('peft', 'diffusers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


HEAVY = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "diffusers.training_utils",
)
"""Modules that load for a second together; only a run whose weights are cut over processes needs some of them."""


def test_only_the_module_of_shards_imports_what_shards_need_when_it_is_loaded():
    loaded = defaultdict(set)
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module in HEAVY:
                loaded[path.name].add(node.module)
    assert set(loaded) == {"sharding.py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixgrpo_flash_guard", "text"])
def test_a_run_without_shards_loads_no_module_of_shards_and_none_of_diffusers_for_training(name: str, request):
    small = request.getfixturevalue("small" if name == "mixgrpo_flash_guard" else "small_text")
    # transformers itself imports FSDP from some version on, so the module of ours that needs FSDP is looked for.
    code = (
        "import sys\n"
        "from flowgrpo.configs.load import load_recipe\n"
        "from flowgrpo.training.session import Session\n"
        f"session = Session(load_recipe({name!r}, {small!r}))\n"
        "print(session.task.device, [m for m in ('flowgrpo.weights.sharding', 'diffusers.training_utils') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "cpu []"
