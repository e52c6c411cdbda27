"""How the examples of the documentation are tried that are not `flowgrpo` commands: programs, Python and recipes."""

import ast
import importlib.util
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe, TextRecipe
from flowgrpo.rewards.serving.encryption import server_context
from tests.doc_commands_checkout import ONE_TEST, Checkout, environment, install
from tests.doc_commands_read import OPERATORS, ROOT, WALKTHROUGHS, Example, examples
from tests.doc_commands_reader import NoRule, Reader

RECIPE_KEYS = {*Recipe.model_fields, *TextRecipe.model_fields, "base", "published"}
# Commands that cannot be run here, by their first words, with the reason. The function of the program, below, still
# checks what can be checked without a run.
NOT_RUN = {
    ("pip", "download"): "asks a package index; that the package is known is checked",
}
# Options that make a script of the docs short; a script that is not listed is run as the page says.
SHORTER = {
    "tests/adapter_speed.py": (
        "--repeats",
        "1",
        "--width",
        "64",
        "--layers",
        "1",
        "--batch",
        "1",
        "--like",
        "",
        "--device",
        "cpu",
    ),
    "tests/optimizer_speed.py": ("--repeats", "1", "--like", "", "--device", "cpu"),
    "tests/language_families.py": ("llama", "lfm2"),
    "tests/block_cache_speed.py": ("--width", "128", "--layers", "1", "--tokens", "8", "--repeats", "1"),
    "docs/measure_gallery.py": ("--images", "32"),
    "docs/measure_gpu.py": ("--minutes", "0"),
    "docs/make_kit_table.py": ("jpeg_compressibility", "spaced"),
    "tests/mutants.py": ("addressing",),
    "tests/same_numbers.py": ("text_digits",),
}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# Modules of the extra `dev`; if a module is not installed, the command that needs it is not run.
OF_DEV = {"style": "ruff", "check": "mypy", "pre-commit": "pre_commit"}
# Packages that a page may tell the reader to install although they are no dependencies of flowgrpo, with the reason.
PACKAGES = {"hpsv3": "its wheel holds the prompt of the reward hpsv3"}
# Programs that only read, or write only into the reader's folder.
HARMLESS = {"cat", "cp", "echo", "grep", "head", "ls", "mkdir", "tail", "wc"}


def follow(reader: Reader, example: Example) -> None:
    """Do what a page shows.

    Raises:
        NoRule: there is no rule for this example.
        AssertionError: the example does not do what the page says.
    """
    if example.kind == "python":
        _run_python(reader, example)
    elif example.kind == "yaml":
        _load_yaml(reader, example)
    elif example.kind == "script":
        assert (reader.home / str(example.file)).exists()
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
    """Run a script of the docs, which must write the same pages as in the repository.

    A script that measures is made short and run once; a second time, only its options are checked.
    """
    if words[1:3] == ["-m", "flowgrpo"]:
        return reader.run(example, words[3:])
    checkout = reader.stock.checkout
    if words[1:3] == ["-m", "venv"]:
        checkout.run(*words, "--without-pip")
        assert (checkout.folder / words[3] / "pyvenv.cfg").is_file()
        return None
    script = words[1]
    assert (ROOT / script).is_file(), f"there is no {script}"
    short = SHORTER.get(script)
    if short is None:
        assert checkout.rewrites(*words)
    elif "chromium" in (ROOT / script).read_text(encoding="utf-8") and CHROMIUM is None:
        assert "no Chromium was found" in checkout.run(*words, *short, status=1)
    elif not reader.first(script):
        options, text = (
            {word for word in words[2:] if word.startswith("--")},
            (ROOT / script).read_text(encoding="utf-8"),
        )
        # A script may add several options in a loop over their names.
        unknown = {each for each in options if f'"{each}"' not in text and f'"{each.removeprefix("--")}"' not in text}
        assert not unknown, f"{script} has no option {', '.join(sorted(unknown))}"
    else:
        checkout.run(*words, *short)
    return None


def _not_run(words: list[str]) -> bool:
    return any(tuple(words[: len(start)]) == start for start in NOT_RUN)


def _pip(reader: Reader, example: Example, words: list[str]) -> None:
    """Install a folder into a prefix, without its dependencies; for other packages, check only their names.

    Without dependencies all extras of a folder install the same, so only the first one is installed.
    """
    _check_names(words[2:])
    if _not_run(words):
        return
    assert words[1] == "install"
    (what,) = (word for word in words[2:] if not word.startswith("-"))
    folder = re.sub(r"\[.*\]$", "", what)
    own = (reader.home / folder).is_dir() and folder != "."
    same = " ".join([folder if word == what else word for word in words])
    if not own and same in reader.done:
        return
    reader.done.add(same)
    prefix = reader.home / "-".join(["prefix", *re.findall(r"\w+", example.text)])
    packages = install(words[2:], reader.home if own else reader.stock.checkout.folder, prefix)
    if own:
        reader.patch.setattr(sys, "path", list(sys.path))
        site.addsitedir(str(packages))
    else:
        listed = reader.stock.checkout.run(str(prefix / "bin" / "flowgrpo"), "recipes", PYTHONPATH=str(packages))
        assert "flow_grpo" in listed


def _check_names(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^([\w-]+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE))
    editable = "-e" in words
    for word in (word for word in words if not word.startswith("-")):
        name, asked = re.fullmatch(r"([\w.-]+?)(?:\[([\w,-]+)\])?(?:[=<>~!].*)?", word).groups()  # type: ignore[union-attr]
        if name in (".", "flowgrpo"):
            unknown = set((asked or "").split(",")) - {"", *extras}
            assert not unknown, f"pyproject.toml has no extra {', '.join(unknown)}"
        elif f'"{name}' not in project and name not in PACKAGES and not editable:
            raise NoRule(f"{name} is neither a dependency nor in PACKAGES")


def _make(reader: Reader, example: Example, words: list[str]) -> None:
    """Run each target once: pages must not change, style and types check one layer, and tests run one file."""
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    unknown = set(words[1:]) - known
    assert not unknown, f"the Makefile has no target {', '.join(unknown)}"
    checkout = reader.stock.checkout
    for target in words[1:]:
        if f"make {target}" in reader.done or _is_missing(target):
            continue
        reader.done.add(f"make {target}")
        if target == "docs":
            _scripts_of(checkout)
        elif target == "docs-site":
            _build_site(checkout, ["make", target])
        elif target in ("test", "quick"):
            python, m, *same = shlex.split(checkout.run("make", "-n", target))
            assert (python, m) == (sys.executable, "-m")
            _pytest(reader, example, same)
        elif target in ("style", "check"):
            checkout.run("make", target, cut=True)
        else:
            raise NoRule(f"no way to try the target {target}")


def _scripts_of(checkout: Checkout) -> None:
    """`make docs` starts every script that writes a page, and nothing else.

    Tests compare each page with what its script writes, and so the scripts, which take minutes, are not run here.
    """
    started = [shlex.split(line)[1:] for line in checkout.run("make", "-n", "docs").splitlines()]
    writers = [
        script.relative_to(ROOT)
        for script in (ROOT / "docs").glob("make_*.py")
        if "PAGE.write_text(" in script.read_text(encoding="utf-8")
    ]
    assert sorted(started) == sorted([str(script)] for script in writers)


def _is_missing(name: str) -> bool:
    return name in OF_DEV and importlib.util.find_spec(OF_DEV[name]) is None


def _pytest(reader: Reader, example: Example, words: list[str]) -> None:
    if reader.first(*words):
        assert " passed" in reader.stock.checkout.run(*words, PYTEST_ADDOPTS=ONE_TEST)


def _mkdocs(reader: Reader, example: Example, words: list[str]) -> None:
    _build_site(reader.stock.checkout, words)


def _build_site(checkout: Checkout, words: list[str]) -> None:
    shutil.rmtree(checkout.folder / "site", ignore_errors=True)
    checkout.run(*words)
    assert (checkout.folder / "site" / "index.html").is_file()


def _pre_commit(reader: Reader, example: Example, words: list[str]) -> None:
    if _is_missing(words[0]):
        return
    checkout = reader.stock.checkout
    checkout.run("git", "init", "--quiet")
    checkout.run(*words)
    assert (checkout.folder / ".git" / "hooks" / "pre-commit").is_file()


def _source(reader: Reader, example: Example, words: list[str]) -> None:
    """Activate the environment in a new shell, which must then find the environment's python."""
    checkout = reader.stock.checkout
    found = checkout.run("sh", "-c", f"{example.text} && command -v python")
    assert Path(found.strip()).is_relative_to(checkout.folder)


def _accelerate(reader: Reader, example: Example, words: list[str]) -> None:
    """`accelerate launch` starts two processes on the CPU, where a page starts more on GPUs."""
    if words[1:] == ["launch"]:
        return None
    if words[1:] == ["config"]:
        reader.stock.checkout.answer(*words, HF_HOME=str(reader.home))
        assert (reader.home / "accelerate" / "default_config.yaml").is_file()
        return None
    # `$(which flowgrpo)` is split into two words.
    plain = [word.removesuffix(")") for word in words if word != "$(which"]
    told = launch_command_parser().parse_args([re.sub(r"^[A-Z_]+$", "1", word) for word in plain[2:]])
    assert Path(told.training_script).name == "flowgrpo", f"it starts {told.training_script}"
    if told.use_deepspeed and importlib.util.find_spec("deepspeed") is None:
        return None
    plain[plain.index("--num_processes") + 1] = "2"
    return _launched(reader, example, [*plain[:2], "--main_process_port", "0", *plain[2:]])


def _torchrun(reader: Reader, example: Example, words: list[str]) -> None:
    """`torchrun` also starts two processes, where a page starts more."""
    told = get_args_parser().parse_args(words[1:])
    assert Path(told.training_script).name == "flowgrpo", f"it starts {told.training_script}"
    assert told.standalone, "without --standalone it takes port 29500, which another run may have"
    plain = list(words)
    plain[plain.index("--nproc-per-node") + 1] = "2"
    _launched(reader, example, plain)


@cache
def _walked() -> str:
    """What the walkthroughs show, for any number of processes."""
    return "\n".join(_counted(page.read_text(encoding="utf-8")) for page in WALKTHROUGHS)


def _counted(text: str) -> str:
    return re.sub(r"(?<= )\d+(?= )", "N", text)


def _launched(reader: Reader, example: Example, words: list[str]) -> None:
    """Start the command that a launcher starts, in the small form that the reader's rule gives.

    If a walkthrough starts the same command by the same launch, `tests/test_walkthroughs.py` really launches it. Then
    the command of the page is run by one process.
    """
    begun = next(at for at, word in enumerate(words) if Path(word).name == "flowgrpo")
    launch = re.match(r".* flowgrpo \w+ ", _counted(" ".join(example.words)))
    if launch is not None and launch[0] in _walked():
        return reader.run(example, words[begun + 1 :])
    own = environment(reader.stock.checkout.folder, {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    launch = words[: begun + 1]

    def start(*small: str) -> None:
        done = subprocess.run(
            [*launch, *small], cwd=reader.home, env=own, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return reader.run(example, words[begun + 1 :], start)


def _export(reader: Reader, example: Example, words: list[str]) -> None:
    """Set the variable to the value that a shell gives it."""
    name, equals, _ = words[1].partition("=")
    assert equals
    text = f'{" ".join(words)}; printf %s "${name}"'
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout, done.stderr
    reader.patch.setenv(name, done.stdout)


def _harmless(reader: Reader, example: Example, words: list[str]) -> None:
    for word in words:
        if word.startswith("runs/"):
            reader.put_run(word)
    done = subprocess.run(words, cwd=reader.home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _openssl(reader: Reader, example: Example, words: list[str]) -> None:
    """Make a certificate, which a server must be able to use."""
    if shutil.which("openssl") is None:
        return
    done = subprocess.run(words, cwd=reader.home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    server_context(*(reader.home / words[words.index(option) + 1] for option in ("-out", "-keyout")))


PROGRAMS: dict[str, Callable[[Reader, Example, list[str]], None]] = {
    "flowgrpo": _flowgrpo,
    "python": _python,
    "pip": _pip,
    "make": _make,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "export": _export,
    ".": _source,
    "pytest": _pytest,
    "pre-commit": _pre_commit,
    "mkdocs": _mkdocs,
    "openssl": _openssl,
    **dict.fromkeys(HARMLESS, _harmless),
}


# -- Python and recipes ------------------------------------------------------------------------------------------------


def _run_python(reader: Reader, example: Example) -> None:
    """Run a fence. A file is a separate module; all other fences of a page are one program, and may use each other."""
    code = compile(example.text, example.place, "exec")
    for node in ast.walk(ast.parse(example.text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("runs/"):
            reader.put_run(node.value)
            if node.value.endswith("/pipeline"):  # of a run of full weights; the run that is put there trained a LoRA
                reader.put_model(node.value)
    if example.file is not None:
        (reader.home / example.file).write_text(example.text, encoding="utf-8")
    exec(code, {"__name__": "example"} if example.file is not None else reader.names)


def _load_yaml(reader: Reader, example: Example) -> None:
    """Read a recipe, or a part of a recipe of pictures or text; it must have no fault.

    A file that the page converts is no recipe. The command that converts it tries it.
    """
    if example.file is not None and any(
        other.words[:3] == ("flowgrpo", "convert", example.file) for other in examples(example.page)
    ):
        (reader.home / example.file).write_text(example.text, encoding="utf-8")
        return
    data = yaml.safe_load(example.text)
    if not isinstance(data, dict) or not set(data) <= RECIPE_KEYS:
        raise NoRule("this YAML is no recipe; say in tests/doc_commands_programs.py how it is to be tried")
    if example.file is not None:
        (reader.home / example.file).write_text(example.text, encoding="utf-8")
    file = reader.home / "example.yaml"
    whole = "base" in data or ("rewards" in data and "task" in data) or example.file is not None
    faults = []
    for base in ("",) if whole else ("base: mixgrpo_flash_guard\n", "base: text\n"):
        file.write_text(base + example.text, encoding="utf-8")
        try:
            load_recipe(file)
            if "published" in data:
                load_recipe(f"{file}@published")
            return
        except ValueError as fault:
            faults.append(fault)
    raise faults[0]
