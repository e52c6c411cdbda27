"""A new package: what is written, what is refused, and that it installs and works."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.kit.package import new_package
from flowgrpo.training.folder.files import NoRoom


def python(*words: str, path: Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", ["images", "text"])
def test_it_installs_appears_and_passes_its_own_tests(task: str, tmp_path: Path):
    new_package("warm_glow", tmp_path / "package", task)
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    python(*pip, "--target", str(site), str(tmp_path / "package"), path=tmp_path, cwd=tmp_path)
    listed = "from flowgrpo.rewards.registry import available, resolve\n"
    listed += "print(available()['warm_glow'], resolve('warm_glow')().name)"
    told = python("-c", listed, path=site, cwd=tmp_path)
    assert told.startswith("Close to a ")
    assert told.split()[-1] == "warm_glow"
    tests = python("-m", "pytest", "-q", "-p", "no:cacheprovider", path=site, cwd=tmp_path / "package")
    assert "4 passed" in tests or "3 passed" in tests


def test_every_file_names_the_reward_and_none_holds_a_mark_of_the_template(tmp_path: Path):
    paths = new_package("glow", tmp_path / "package")
    assert [str(path.relative_to(tmp_path / "package")) for path in paths] == [
        "pyproject.toml", "README.md", "src/flowgrpo_glow/__init__.py", "src/flowgrpo_glow/reward.py",
        "tests/test_reward.py",
    ]  # fmt: skip
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert "glow" in text.lower()
        assert "$" not in text
    assert sorted(tmp_path.iterdir()) == [tmp_path / "package"]


def test_the_run_it_suggests_takes_rewards_of_any_size(tmp_path: Path):
    *_, run = re.findall(
        r"^flowgrpo train (.*)$", new_package("glow", tmp_path / "package")[1].read_text(), re.MULTILINE
    )
    source, *overrides = shlex.split(run.replace("name: glow", "name: proxy"))
    assert load_recipe(source, overrides).advantage["scale"] == "group"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-reward", "my_reward"),
        ("2nd", "nd"),
        ("class", "sharpness"),
        ("none", "sharpness"),
        ("été", "cannot name"),
        ("a_", "such as a"),
        ("../up", "such as up"),
        ("", "sharpness"),
        ("gold", "reward 'gold' already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, says: str, tmp_path: Path):
    with pytest.raises(ValueError, match=says):
        new_package(name, tmp_path / "package")
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_installed_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "flowgrpo_taken.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="flowgrpo_taken is installed"):
        new_package("taken", tmp_path / "package")


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        new_package("glow", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    new_package("glow", tmp_path / "empty")
    assert (tmp_path / "empty" / "pyproject.toml").is_file()
    with pytest.raises(ValueError, match="task"):
        new_package("glow", tmp_path / "other", "video")


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_no_file_and_is_told_with_the_file(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = Path.write_text

    def full(path: Path, *text: str, **how: str) -> int:
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *text, **how)

    if exists:
        (tmp_path / "mine").mkdir()
    before = set(tmp_path.rglob("*"))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(NoRoom) as failed:
        new_package("mine", tmp_path / "mine")
    assert failed.value.filename == str(tmp_path / "mine" / "README.md")
    assert set(tmp_path.rglob("*")) == before
