"""How everything else in the documentation is tried: other programs, Python and recipes."""

import ast
import builtins
import re
import subprocess
import symtable
from collections.abc import Callable
from pathlib import Path

import yaml
from accelerate.commands.launch import launch_command_parser

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe, TextRecipe
from tests.doc_commands_read import OPERATORS, ROOT, Example
from tests.doc_commands_reader import NoRule, Reader

RECIPE_KEYS = {*Recipe.model_fields, *TextRecipe.model_fields, "base", "published"}
# What cannot be run here, by how it begins, and why. Whatever else can be said of it is checked by its program below.
NOT_RUN = {
    ("python", "-m", "venv"): "makes an environment; .ci/run does",
    (".", ".venv/bin/activate"): "is of the reader's shell",
    ("pre-commit", "install"): "changes the reader's checkout",
    ("pytest",): "is what runs this",
    ("mkdocs", "build"): "needs the packages of the extra docs",
    ("pip", "install"): "asks a package index; that its extras are declared is checked",
    ("pip", "download"): "asks a package index",
    ("accelerate", "config"): "asks the reader",
    ("make",): "changes or checks the whole checkout; that its targets exist is checked",
    ("python",): "scripts write the repository's pages, which tests/test_docs.py compares; that they exist is checked",
}
# Packages that a page may tell to install although this one does not know them, and what for.
PACKAGES = {"hpsv3": "its wheel holds the prompt of the reward hpsv3"}
# Only read, and write into the reader's folder.
HARMLESS = {"cat", "cp", "echo", "grep", "head", "ls", "mkdir", "tail", "wc"}


def follow(reader: Reader, example: Example) -> None:
    """Do what a page shows.

    Raises:
        NoRule: nobody knows how.
        AssertionError: it does not do what the page says.
    """
    if example.kind == "python":
        _run_python(reader, example)
    elif example.kind == "yaml":
        _load_yaml(reader, example)
    else:
        _run_words(reader, example, list(example.words))


def _run_words(reader: Reader, example: Example, words: list[str]) -> None:
    while words and (named := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", words[0])):
        reader.patch.setenv(named[1], named[2])
        words = words[1:]
    if any(word in OPERATORS for word in words):
        raise NoRule("pipes and redirections are not tried; write one command a line")
    if not words:
        return
    program = PROGRAMS.get(words[0])
    if program is None:
        raise NoRule(f"no rule in tests/doc_commands_programs.py for `{words[0]}`")
    program(reader, example, words)


# -- programs ----------------------------------------------------------------------------------------------------------


def _flowgrpo(reader: Reader, example: Example, words: list[str]) -> None:
    reader.run(example, words[1:])


def _python(reader: Reader, example: Example, words: list[str]) -> None:
    if words[1:3] == ["-m", "flowgrpo"]:
        return reader.run(example, words[3:])
    if words[1:2] == ["-m"]:
        return _not_run(reader, example, words)
    script = ROOT / words[1]
    assert script.is_file(), f"there is no {words[1]}"
    compile(script.read_text(encoding="utf-8"), words[1], "exec")
    return _not_run(reader, example, words)


def _not_run(reader: Reader, example: Example, words: list[str]) -> None:
    if not any(tuple(words[: len(start)]) == start for start in NOT_RUN):
        raise NoRule(f"neither a rule nor a reason in NOT_RUN for `{' '.join(words)}`")


def _pip(reader: Reader, example: Example, words: list[str]) -> None:
    """An editable folder is put on the path with its entry points; of the rest the names have to be right."""
    _not_run(reader, example, words)
    words = words[2:]
    if "-e" in words and (folder := reader.home / words[words.index("-e") + 1]).is_dir():
        return _install(reader, folder)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^([\w-]+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE))
    for word in (word for word in words if not word.startswith("-")):
        name, asked = re.fullmatch(r"([\w.-]+?)(?:\[([\w,-]+)\])?(?:[=<>~!].*)?", word).groups()  # type: ignore[union-attr]
        if name in (".", "flowgrpo"):
            unknown = set((asked or "").split(",")) - {"", *extras}
            assert not unknown, f"pyproject.toml has no extra {', '.join(unknown)}"
        elif f'"{name}' not in project and name not in PACKAGES:
            raise NoRule(f"{name} is neither a dependency nor in PACKAGES")
    return None


def _install(reader: Reader, folder: Path) -> None:
    """What `pip install -e` does of it that matters here: tests/kit/test_package.py installs one."""
    project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    name = re.search(r'^name = "(.+)"', project, re.MULTILINE)
    points = re.search(r'^\[project\.entry-points\."(.+)"\]\n((?:\w+ = ".+"\n)+)', project, re.MULTILINE)
    assert name is not None
    assert points is not None
    facts = folder / "src" / f"{name[1].replace('-', '_')}-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name[1]}\nVersion: 0.1.0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text(f"[{points[1]}]\n{points[2].replace(chr(34), '')}", encoding="utf-8")
    reader.patch.syspath_prepend(folder / "src")


def _make(reader: Reader, example: Example, words: list[str]) -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    unknown = set(words[1:]) - known
    assert not unknown, f"the Makefile has no target {', '.join(unknown)}"
    _not_run(reader, example, words)


def _accelerate(reader: Reader, example: Example, words: list[str]) -> None:
    """`accelerate launch` has to understand its own words; what it starts is run in this one process."""
    if words[1:] == ["launch"]:
        return None
    if words[1] != "launch":
        return _not_run(reader, example, words)
    # `$(which flowgrpo)` stands in two words.
    plain = [word.removesuffix(")") for word in words if word != "$(which"]
    told = launch_command_parser().parse_args([re.sub(r"^[A-Z_]+$", "1", word) for word in plain[2:]])
    assert Path(told.training_script).name == "flowgrpo", f"it starts {told.training_script}"
    begun = next(at for at, word in enumerate(plain) if Path(word).name == "flowgrpo")
    return reader.run(example, plain[begun + 1 :])


def _export(reader: Reader, example: Example, words: list[str]) -> None:
    name, equals, value = words[1].partition("=")
    assert equals
    reader.patch.setenv(name, "a-token-of-the-reader" if value.startswith("$(") else value)


def _harmless(reader: Reader, example: Example, words: list[str]) -> None:
    for word in words:
        if word.startswith("runs/"):
            reader.put_run(word)
    done = subprocess.run(words, cwd=reader.home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PROGRAMS: dict[str, Callable[[Reader, Example, list[str]], None]] = {
    "flowgrpo": _flowgrpo,
    "python": _python,
    "pip": _pip,
    "make": _make,
    "accelerate": _accelerate,
    "export": _export,
    **dict.fromkeys((".", "pytest", "pre-commit", "mkdocs"), _not_run),
    **dict.fromkeys(HARMLESS, _harmless),
}


# -- Python and recipes ------------------------------------------------------------------------------------------------


def _run_python(reader: Reader, example: Example) -> None:
    """Files and programs are run; of a fragment, which takes names or models from elsewhere, the imports."""
    code = compile(example.text, example.place, "exec")
    tree = ast.parse(example.text)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if free_names(example.text) or any(text.startswith("/models/") for text in texts):
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        code = compile(ast.Module(imports, []), example.place, "exec")
    for text in texts:
        if text.startswith("runs/"):
            reader.put_run(text)
    if example.file is not None:
        (reader.home / example.file).write_text(example.text, encoding="utf-8")
    exec(code, {"__name__": "example"})


def free_names(source: str) -> set[str]:
    """Names that a program takes from nowhere."""
    top = symtable.symtable(source, "example", "exec")
    bound = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    asked: set[str] = set()
    tables = [top]
    for table in tables:
        tables += table.get_children()
        asked |= {each.get_name() for each in table.get_symbols() if each.is_global() or table is top}
    return {name for name in asked - bound if not hasattr(builtins, name) and not name.startswith("__")}


def _load_yaml(reader: Reader, example: Example) -> None:
    """A recipe, or a part of one of pictures or of text, has to be read without a fault."""
    data = yaml.safe_load(example.text)
    if not isinstance(data, dict) or not set(data) <= RECIPE_KEYS:
        raise NoRule("this YAML is no recipe; say in tests/doc_commands_programs.py how it is to be tried")
    if example.file is not None:
        (reader.home / example.file).write_text(example.text, encoding="utf-8")
    file = reader.home / "example.yaml"
    whole = "base" in data or ("rewards" in data and "task" in data) or example.file is not None
    faults = []
    for base in ("",) if whole else ("base: default\n", "base: text\n"):
        file.write_text(base + example.text, encoding="utf-8")
        try:
            load_recipe(file)
            if "published" in data:
                load_recipe(f"{file}@published")
            return
        except ValueError as fault:
            faults.append(fault)
    raise faults[0]
