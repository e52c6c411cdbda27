"""How a name becomes a scorer, and the message for each wrong name."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.rewards import MissingDependency, RewardSpec, Scores, available, build, register, resolve
from flowgrpo.rewards import registry as registry_module

SERVER = {"url": "http://a:1/v1", "model": "m"}
PLUGIN = '''
"""A user's file."""
import dataclasses


def brightness(images, prompts, scale=1.0, **columns):
    """Mean of all pixels."""
    return images.flatten(1).mean(1) * scale


class Length:
    """Characters of the completion."""

    name = "chars"

    def __init__(self, unit: int = 1, *, cap: float):
        self.unit, self.cap = unit, cap

    def __call__(self, completions, prompts):
        return [min(len(text) / self.unit, self.cap) for text in completions]
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict:
    names: dict = {}
    monkeypatch.setattr(registry_module, "_REGISTERED", names)
    return names


def set_entry_points(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    made = [importlib.metadata.EntryPoint(name, value, "flowgrpo.rewards") for name, value in points]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: importlib.metadata.EntryPoints(made))


def images(*levels: float) -> torch.Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)


def test_function_of_a_file_with_a_bound_option(plugin: Path) -> None:
    reward = build(RewardSpec(f"{plugin}:brightness", weight=2.0, options={"scale": 10}))
    scores = reward.score(images(0.25, 0.5), ["a", "b"], {"skill": ["x", "y"]})
    assert scores.values.dtype == torch.float32
    torch.testing.assert_close(scores.values, torch.tensor([2.5, 5.0]))
    assert (reward.name, reward.weight) == ("brightness", 2.0)


def test_class_of_a_file_gets_its_options_and_names_itself(plugin: Path) -> None:
    spec = RewardSpec(f"{plugin}:Length", options={"unit": 2, "cap": 3})
    assert build(spec).score(["ab", "abcdefgh"], ["p", "q"]).values.tolist() == [1.0, 3.0]
    assert build(spec).name == "chars"
    assert build(RewardSpec(spec.name, options=spec.options, label="len")).name == "len"


def test_dotted_name_and_entry_point_give_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    set_entry_points(monkeypatch, ("squash_size", "flowgrpo.rewards.models.jpeg:JpegCompressibility"))
    found = resolve("squash_size")
    assert found is resolve("flowgrpo.rewards.models.jpeg:JpegCompressibility")
    assert found is resolve("jpeg_compressibility")


def test_two_packages_that_declare_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_entry_points(monkeypatch, ("size", "one:A"), ("size", "two:B"))
    with pytest.raises(ValueError, match=r"more than once.*one:A, two:B"):
        resolve("size")


def test_registered_name_resolves_and_cannot_be_taken_twice(registered: dict) -> None:
    @register("sharp")
    def sharp(images: torch.Tensor, prompts: list[str]) -> list[float]:
        """Edges."""
        return [0.0] * len(prompts)

    def other(images: torch.Tensor, prompts: list[str]) -> list[float]:
        return [1.0] * len(prompts)

    assert resolve("sharp") is sharp
    assert register("sharp")(sharp) is sharp
    with pytest.raises(ValueError, match="already registered"):
        register("sharp")(other)
    with pytest.raises(ValueError, match="built in"):
        register("jpeg_compressibility")(other)
    with pytest.raises(ValueError, match="cannot name"):
        register("a:b")


def test_available_lists_all_sources_with_their_docstrings(
    registered: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "heavy_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported to be listed')")
    (package / "score.py").write_text('def aesthetics(images, prompts):\n    """Beauty.\n\n    More."""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    set_entry_points(monkeypatch, ("beauty", "heavy_rewards.score:aesthetics"), ("gone", "absent_pkg.x:y"))
    register("mine")(lambda images, prompts: [0.0])
    found = available()
    assert list(found) == sorted(found)
    assert {"gold", "proxy", "clip_score", "jpeg_compressibility", "jpeg_incompressibility"} <= set(found)
    assert found["beauty"] == "Beauty."
    assert found["gone"] == "absent_pkg.x:y"
    assert found["clip_score"].startswith("Text match")
    assert found["jpeg_incompressibility"].startswith("Large JPEG")
    assert "<lambda>" in found["mine"]
    assert "heavy_rewards" not in sys.modules


def test_unknown_name_names_the_nearest_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    set_entry_points(monkeypatch, ("from_package", "a:b"))
    with pytest.raises(ValueError, match="did you mean 'clip_score'") as caught:
        resolve("clipscore")
    assert "from_package" in str(caught.value)
    assert "gold" in str(caught.value)
    with pytest.raises(ValueError, match=r"'package\.module:attr'"):
        resolve("package.module.attr")


def test_file_and_module_faults_say_what_there_is(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"does not exist.*did you mean 'mine\.py'"):
        resolve(str(plugin.with_name("mime.py")) + ":brightness")
    with pytest.raises(ValueError, match=r"does not define 'bright'.*'brightness'.*Length, brightness"):
        resolve(f"{plugin}:bright")
    with pytest.raises(ValueError, match=r"mine\.py:NAME'.*Length, brightness"):
        resolve(str(plugin))
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        resolve("no_such_module:f")
    monkeypatch.chdir(plugin.parent)
    # A file that was read before has made the modules beside it known.
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "mine.py").is_file()])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ValueError, match=r"'\./mine\.py:NAME'"):
        resolve("mine:brightness")
    assert resolve("./mine.py:brightness").__doc__ == "Mean of all pixels."


def test_an_edited_file_is_read_again_and_an_unchanged_one_is_not(plugin: Path) -> None:
    first = resolve(f"{plugin}:brightness")
    assert resolve(f"{plugin}:brightness") is first
    plugin.write_text(PLUGIN + "\n\ndef added(images, prompts):\n    return [7.0] * len(prompts)\n")
    assert resolve(f"{plugin}:added")(images=None, prompts=["a"]) == [7.0]


def test_missing_package_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import surely_not_installed_pkg.sub\n")
    with pytest.raises(MissingDependency, match=r"pip install surely_not_installed_pkg$"):
        resolve(f"{tmp_path}/a.py:f")
    source = "class Judge:\n    def __init__(self):\n        raise ModuleNotFoundError('x', name='cv2')\n"
    (tmp_path / "b.py").write_text(source + "    def __call__(self, images, prompts): ...\n")
    with pytest.raises(MissingDependency, match="pip install opencv-python-headless"):
        build(RewardSpec(f"{tmp_path}/b.py:Judge"))


def test_options_are_checked_against_the_signature(plugin: Path) -> None:
    with pytest.raises(ValueError, match=r"no option 'scal'; did you mean 'scale'"):
        build(RewardSpec(f"{plugin}:brightness", options={"scal": 1}))
    with pytest.raises(ValueError, match="no option 'images'"):
        build(RewardSpec(f"{plugin}:brightness", options={"images": 1}))
    with pytest.raises(ValueError, match="needs the option cap"):
        build(RewardSpec(f"{plugin}:Length"))
    with pytest.raises(ValueError, match="no option 'quantity'"):
        build(RewardSpec("jpeg_compressibility", options={"quantity": 3}))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), True])
def test_weight_must_be_a_finite_number(weight: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        RewardSpec("gold", weight=weight)


@pytest.mark.slow
def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, flowgrpo.rewards as r; assert 'torch' not in sys.modules; "
        "assert all(getattr(r, n) is not None for n in r.__all__); assert 'open_clip' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(registry_module.__file__).parents[2])


def test_scores_dataclass_is_what_a_plugin_imports() -> None:
    import flowgrpo.rewards.base as base

    assert Scores is base.Scores


def test_an_outline_is_not_made_and_knows_signature_attributes_and_packages(monkeypatch: pytest.MonkeyPatch):
    class Heavy:
        whole_group = True
        batch_size = 3

        def __init__(self, folder: str = "weights") -> None:
            raise AssertionError("an outline is not made")

        def __call__(self, images: Any, mark: Any, note: Any = None) -> list[float]:
            return []

    monkeypatch.setitem(registry_module._REGISTERED, "heavy", Heavy)
    found = registry_module.outline(RewardSpec("heavy", weight=2.0, options={"folder": "x"}))
    assert (found.name, found.weight, found.whole_group, found.batch_size) == ("heavy", 2.0, True, 3)
    assert (found.needed, found.optional) == (["images", "mark"], ["note"])
    with pytest.raises(ValueError, match="no option 'folded'; did you mean 'folder'"):
        registry_module.outline(RewardSpec("heavy", options={"folded": "x"}))
    monkeypatch.setitem(registry_module.NEEDS, "heavy", ("not_installed_anywhere",))
    with pytest.raises(MissingDependency, match="pip install not_installed_anywhere"):
        registry_module.outline(RewardSpec("heavy"))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("remote", {"url": "notaurl"}, "remote: url is 'notaurl'; give the address of a server"),
        ("remote", {"url": ["http://a:1", "b"]}, "remote: url is 'b'; give the address of a server"),
        ("remote", {"url": "http://a:1", "encoding": "jpeg"}, "encoding is 'jpeg'; give one of float32, uint8, png"),
        ("remote", {"url": "http://a:1", "patience": -1}, "patience is -1"),
        (
            "judge",
            {"server": {"url": "notaurl", "model": "m"}},
            "judge: url is 'notaurl'; give the address of a server",
        ),
        ("rubric", {"server": {"url": "http://a:1/v1"}, "criteria": ["good"]}, "rubric: server needs model"),
        ("remote", {"url": "http://a:1", "token_env": 5}, "remote: 5 is not the name of an environment variable"),
        ("judge", {"server": {**SERVER, "key_env": ""}}, "judge: '' is not the name of an environment variable"),
        ("win_rate", {"judge": "unified_rewards"}, "judge 'unified_rewards' cannot be made: "),
        ("win_rate", {"judge": "unified_reward"}, "cannot be made: reward 'unified_reward' needs the option server"),
        ("win_rate", {"judge": "gold", "judge_options": {"dens": 1}}, "did you mean 'dense'"),
        (
            "win_rate",
            {"judge": "judge", "judge_options": {"server": {"url": "a", "model": "m"}}},
            "win_rate: the judge 'judge' cannot be made: judge: url is 'a'",
        ),
        ("win_rate", {"judge": 3}, "win_rate: judge is 3 and judge_options None; give the name of a reward"),
        ("win_rate", {"judge": "gold", "margin": -1}, "win_rate: margin is -1"),
        ("confidence", {"correct": "anser"}, "confidence: the reward 'anser' for `correct` cannot be made"),
        ("length", {"limit": 9, "correct": "anser"}, "length: the reward 'anser' for `correct` cannot be made"),
        ("tool_thrift", {"correct_options": {"partil": True}}, "did you mean 'partial'"),
        ("tool_thrift", {"correct_options": []}, "give the name of a reward and a mapping of its options"),
    ],
)
def test_options_that_need_no_server_are_checked_before_a_run(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        registry_module.outline(RewardSpec(name, options=options))


@pytest.mark.parametrize(
    ("name", "options", "where"),
    [
        ("remote", {"url": "http://a:1"}, ["http://a:1"]),
        ("remote", {"url": ["http://a:1", "http://b:2"]}, ["http://a:1, http://b:2"]),
        (
            "remote",
            {"url": "http://a:1", "token_env": "NO_TOKEN"},
            ["http://a:1 (its token is missing here: export NO_TOKEN where the run starts)"],
        ),
        ("remote", {"url": "http://a:1", "token_env": "A_TOKEN"}, ["http://a:1"]),
        ("judge", {"server": SERVER, "prompt": "?"}, ["http://a:1/v1"]),
        ("win_rate", {"judge": "unified_reward", "judge_options": {"server": SERVER}}, ["http://a:1/v1"]),
        ("win_rate", {"judge": "gold"}, []),
        (
            "relative",
            {"reward": "rubric", "reward_options": {"server": SERVER}, "liked": ["a"], "disliked": ["b"]},
            ["http://a:1/v1"],
        ),
        ("confidence", {"correct": "verifier", "correct_options": {"server": SERVER}}, ["http://a:1/v1"]),
        ("length", {"limit": 9}, []),
        ("length", {"limit": 9, "correct": "verifier", "correct_options": {"server": SERVER}}, ["http://a:1/v1"]),
        ("tool_thrift", {}, []),
        ("ocr", {}, []),
    ],
)
def test_the_servers_of_a_reward_are_known_without_a_question(
    name: str, options: dict[str, Any], where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    monkeypatch.setenv("A_TOKEN", "secret")
    assert registry_module.servers(RewardSpec(name, options=options)) == where


def test_a_judge_that_only_compares_is_checked_without_being_made(tmp_path: Path) -> None:
    file = tmp_path / "judges.py"
    file.write_text(
        "class Pairs:\n"
        "    def __init__(self, folder='weights'): raise AssertionError('a check makes no judge')\n"
        "    def compare(self, first, second, prompts): return [0.5] * len(prompts)\n"
        "def alike(first, second, prompts, by=1): return [0.5] * len(prompts)\n"
    )
    for judge in ({"judge": f"{file}:Pairs", "judge_options": {"folder": "x"}}, {"judge": f"{file}:alike"}):
        assert registry_module.outline(RewardSpec("win_rate", options=judge)).whole_group
    with pytest.raises(ValueError, match="did you mean 'folder'"):
        registry_module.outline(
            RewardSpec("win_rate", options={"judge": f"{file}:Pairs", "judge_options": {"folded": 1}})
        )


def test_a_server_is_not_asked_for_an_outline() -> None:
    assert registry_module.outline(RewardSpec("remote", options={"url": "http://127.0.0.1:1"})).name == "remote"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("subprocess:Popen", {"args": ["touch", "ran"]}),
        ("os:system", {"command": "touch ran"}),
        ("builtins:exec", {}),
        ("shutil:rmtree", {"path": "ran"}),
        ("torch.hub:load", {"repo_or_dir": ".", "model": "m", "source": "local"}),
        ("torch:from_file", {"filename": "ran"}),
        ("torch.nn:Linear", {"in_features": 1, "out_features": 1}),
        ("torch.utils.data:DataLoader", {"dataset": []}),
    ],
)
def test_code_that_is_no_reward_is_refused_before_it_is_called(
    name: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="reward"):
        build(RewardSpec(name, options=options))
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_only_imports_must_be_a_reward_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from functools import partial\nfrom shutil import rmtree\nfrom torch.hub import load\n"
        "def by_column(answer): return [1.0] * len(answer)\n"
        "def scaled(images, prompts, scale): return [scale] * len(prompts)\n"
        "half = partial(scaled, scale=0.5)\n"
    )
    for name in ("rmtree", "load"):
        with pytest.raises(ValueError, match="reward"):
            build(RewardSpec(f"{file}:{name}"))
    for name in ("by_column", "scaled", "half"):
        assert build(RewardSpec(f"{file}:{name}")).name == name
