"""`flowgrpo rewards new`: a small package with a reward, its entry point, a test and a README."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
from importlib import resources
from pathlib import Path
from string import Template

from ..parts.plugins import nearest
from ..rewards.registry import available
from ..training.folder.files import writing

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "src/$module/__init__.py": "init.py.in",
    "src/$module/reward.py": "reward_$task.py.in",
    "tests/test_reward.py": "test_$task.py.in",
}


def check_name(name: str) -> None:
    """Refuse a name that cannot be a reward's.

    Raises:
        ValueError: the name is no identifier, belongs to another reward, or its package would hide an installed one.
    """
    if not _usable(name):
        tidy = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789").lower()
        hint = f", such as {tidy if _usable(tidy) else 'sharpness'}"
        raise ValueError(
            f"{name!r} cannot name a reward; write a word of letters, digits and underscores that begins with a "
            f"letter{hint}"
        )
    if name in available():
        raise ValueError(f"there is a reward {name!r} already; choose another name (`flowgrpo rewards` lists them)")
    if importlib.util.find_spec(f"flowgrpo_{name}") is not None:
        raise ValueError(f"a module flowgrpo_{name} is installed already; choose another name, or uninstall it")


def new_package(name: str, out: Path | None = None, task: str = "images") -> list[Path]:
    """Write a package for a new reward.

    Args:
        name: name of the reward.
        out: folder of the package, new or empty; by default `name` in the working directory.
        task: "images" or "text".

    Returns:
        Paths of the files written.

    Raises:
        ValueError: the name cannot be used, the task is unknown, or the folder is not empty.
        OSError: a file could not be written. No file is left.
    """
    check_name(name)
    if task not in ("images", "text"):
        raise ValueError(f"the task is {task!r}{nearest(task, ('images', 'text'))} Write images or text.")
    folder = Path(name) if out is None else out
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; name another with --out")
    words = {
        "name": name,
        "project": re.sub(r"_+", "-", f"flowgrpo-{name}").lower(),
        "module": f"flowgrpo_{name}",
        "title": _title(name),
        "task": task,
        # The default recipe does not scale rewards, and a new reward may have any scale.
        "recipe": "default advantage.scale=group" if task == "images" else "text",
        "yardstick": "gold" if task == "images" else "answer",
        "try_on": "--images FOLDER" if task == "images" else "--data FILE",
    }
    source = resources.files("flowgrpo.kit") / "template"
    # All files appear at once, because the next call would refuse a folder that is half written.
    final = folder.absolute()
    partial = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    paths = []
    try:
        for target, template in FILES.items():
            path = Path(Template(target).substitute(words))
            text = (source / Template(template).substitute(words)).read_text(encoding="utf-8")
            with writing(folder / path):
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                (partial / path).write_text(Template(text).substitute(words), encoding="utf-8")
            paths.append(folder / path)
        if folder.exists():
            for child in partial.iterdir():
                os.replace(child, folder / child.name)
        else:
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return paths


def _usable(name: str) -> bool:
    """Whether the name, and the class name made from it, are valid in Python code."""
    return bool(_NAME.fullmatch(name)) and not keyword.iskeyword(name) and not keyword.iskeyword(_title(name))


def _title(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
