"""What a recipe would run and send is found wherever it stands, and recipes of the package do nothing of the kind."""

import importlib.metadata
import json
import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest

import flowgrpo
from flowgrpo.configs import trust
from flowgrpo.configs.layers import parts, recipe_lines
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.configs.reward_sections import RewardConfig
from flowgrpo.configs.schema import Recipe, TextRecipe
from flowgrpo.configs.trust import PARTS_OF_FORMS, PLAIN, acts, config_file
from flowgrpo.configs.yaml_text import parse_yaml
from flowgrpo.intake import ledger
from flowgrpo.parts.choice import Choice, Of, options_model
from flowgrpo.parts.kinds import KINDS
from flowgrpo.parts.section import Section
from flowgrpo.rewards.registry import BUILTIN


def kinds_in(annotation: Any) -> set[type]:
    """Sections, parts and rewards at any depth of a type."""
    inner = get_args(annotation)
    plain = isinstance(annotation, type) and not inner  # on Python 3.10, `list[str]` is a type too
    found = {annotation} if plain else set()
    if plain and issubclass(annotation, Section):
        inner = tuple(field.annotation for field in annotation.model_fields.values())
    return found.union(*(kinds_in(one) for one in inner))


@pytest.mark.parametrize("schema", [Recipe, TextRecipe])
def test_no_part_or_reward_stands_where_nobody_looks(schema: type[Section]):
    seen = {key for key, field in schema.model_fields.items() if {Choice, RewardConfig} & kinds_in(field.annotation)}
    assert {"rewards", "evaluate", "advantage", "extensions", "objective"} <= seen
    assert seen & set(PLAIN) == set()


def test_the_parts_of_forms_are_known_and_their_texts_are_no_code(tmp_path: Path):
    forms = KINDS["form"].builtin
    asked = {name for form in forms for name, field in options_model("form", form).model_fields.items()
             if any(isinstance(one, Of) for one in field.metadata)}  # fmt: skip
    assert asked == set(PARTS_OF_FORMS)
    said = [
        [act.says for act in acts({"rollout": {"prompts": 3, "form": form}}, tmp_path)]
        for form in (
            {"name": "hints", "template": "{prompt} Hint: {hint}"}, {"name": "turns", "tool": {"name": "calculator"}},
            {"name": "turns", "tool": {"name": "mine.py:saw"}}, "mine.py:saw", {"name": "mine.py:saw"},
        )
    ]  # fmt: skip
    assert said[:2] == [[], []]
    assert all("run the part mine.py:saw" in acts_of[0] for acts_of in said[2:])


def test_every_reward_that_names_another_is_known():
    package = Path(flowgrpo.__file__).parent
    makers = {
        path.name
        for folder in ("rewards", "inference", "worlds")
        for path in (package / folder).rglob("*.py")
        if re.search(r"\bbuild\(RewardSpec|import .*\bconstruct\b|\binner_reward\(", path.read_text(encoding="utf-8"))
    }
    known = {"win_rate.py", "relative.py", "within.py", "length.py", "confidence.py", "serve.py", "tool_thrift.py",
             "rendered.py"}  # fmt: skip
    assert makers == known, "see configs.trust.NAMING"


def test_every_reward_that_asks_a_server_is_known():
    """A reward asks a server if its module makes a client, or if it inherits one."""
    package = Path(flowgrpo.__file__).parents[1]
    asking = set()
    for name, target in BUILTIN.items():
        source = (package / target.partition(":")[0].replace(".", "/")).with_suffix(".py").read_text()
        if re.search(r"Client(Pool)?\(|\bserved_judge import .*ServedJudge|\bimport .*CriteriaJudge", source):
            asking.add(name)
    assert asking == set(trust.JUDGES)


def test_only_judges_inherit_a_client():
    """The classes from which the rewards of the test above may inherit a client."""
    rewards = Path(flowgrpo.__file__).parent / "rewards"
    found = {
        parent
        for path in rewards.rglob("*.py")
        for parent in re.findall(r"class \w+\((\w*Judge)\)", path.read_text(encoding="utf-8"))
    }
    assert found == {"ServedJudge", "CriteriaJudge"}


@pytest.mark.parametrize("name", recipe_lines())
def test_a_recipe_of_the_package_needs_no_trust(name: str):
    recipe = parse_yaml(dump_recipe(load_recipe(name)), name)
    assert acts(recipe, Path("run")) == []


def test_parts_of_the_package_need_no_trust_unless_they_ask_a_server():
    sending = {part.name for part in parts().values() if acts(part.recipe, Path("run"))}
    assert sending == set()


def test_a_data_set_of_the_hub_is_downloaded_only_on_trust():
    recipe = {"data": {"train": "hub:owner/name?split=train", "heldout": "hub:owner/name?split=test", "test": "t.txt"}}
    (act,) = acts(recipe, Path("run"))
    assert act.says == "download the data set owner/name from the hub"
    # The commit, which a run writes into its recipe, is no new thing. Another data set is one.
    assert acts({"data": {"train": f"hub:owner/name?revision={'a' * 40}"}}, Path("run")) == [act]
    assert acts({"data": {"train": "hub:owner/names"}}, Path("run")) != [act]
    # A command that makes no rewards reads no prompts of the hub.
    assert acts(recipe, Path("run"), rewards=False) == []
    assert acts({"data": ["hub:owner/name"]}, Path("run")) == acts({"data": {"train": 3}}, Path("run")) == []


def test_images_that_a_penalty_learns_are_data_and_no_code():
    def said(**entry: Any) -> list[str]:
        return [act.says for act in acts({"penalties": [{"weight": 0.1, **entry}]}, Path("run"))]

    assert said(name="data", source="scenes:pairs", column="a:b") == []
    assert said(name="data", source="hub:owner/name") == ["download the data set owner/name from the hub"]
    assert said(name="data", source={"name": "mine.py:saw"}) != []
    assert said(name="mine.py:data", source="hub:owner/name")[0].startswith("run the part mine.py:data")
    known = options_model("penalty", "data").model_fields
    assert {name for name, field in known.items() if field.annotation is str} == {"source", "column"}


def test_what_installed_packages_declare_is_listed(monkeypatch: pytest.MonkeyPatch):
    declared = {"sharp": "flowgrpo.rewards", "odd": "flowgrpo.kernel", "euler": "flowgrpo.solver"}
    points = [importlib.metadata.EntryPoint(name, "package.module:thing", group) for name, group in declared.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: importlib.metadata.EntryPoints(points))
    recipe = {"rewards": [{"name": "sharp"}], "sampler": {"kernel": {"name": "odd"}, "solver": "euler"}}
    assert [act.says for act in acts(recipe, Path("run"))] == [
        "run the reward package.module:thing", "run the part package.module:thing"
    ]  # fmt: skip
    assert [act.says for act in acts(recipe, Path("run"), rewards=False)] == ["run the part package.module:thing"]


@pytest.mark.parametrize("keys", [{"rewards": 3}, {"rewards": ["a:b"]}, {"evaluate": [1]}, {"sampler": {3: [None]}}])
def test_a_recipe_of_any_shape_can_be_looked_at(keys: dict):
    assert len(acts(keys, Path("run"))) == ("a:b" in str(keys))


def test_a_file_is_the_recipe_of_a_run_by_its_name(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("base: default\n")
    (tmp_path / "mine.yaml").write_text("base: default\n")
    for source in (config, f"{config}@published", f"{config}+sd35_medium", f"{config}@published+sd35_medium"):
        assert config_file(str(source)) == config
    for source in ("default", str(tmp_path / "mine.yaml"), str(tmp_path / "no" / "config.yaml")):
        assert config_file(source) is None


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ledger, "_here", set())
    return tmp_path / "state" / "flowgrpo" / "trusted.jsonl"


def forget() -> None:
    ledger._here.clear()


def test_the_ledger_survives_lines_that_are_cut_short(state: Path):
    assert ledger.trust({"one": "first"}) is None
    with state.open("a") as file:
        file.write('{"digest": "tw')
    assert ledger.trust({"three": "third"}) is None
    with state.open("a") as file:
        file.write("[" * 10_000 + "\n7\n")
    forget()
    assert [ledger.trusted(name) for name in ("one", "tw", "two", "three")] == [True, False, False, True]
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700


def test_a_thing_is_written_once(state: Path):
    for _ in range(3):
        ledger.trust({"one": "first"})
    assert [json.loads(line)["what"] for line in state.read_text().splitlines()] == ["first"]


def test_a_ledger_of_another_user_counts_for_nothing(state: Path, monkeypatch: pytest.MonkeyPatch):
    ledger.trust({"one": "first"})
    forget()
    other = state.stat().st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert not ledger.trusted("one")


def test_a_relative_state_home_is_not_used(state: Path, monkeypatch: pytest.MonkeyPatch):
    """The XDG specification says so; otherwise the memory would depend on the working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(state.parents[1]))
    assert ledger.ledger_files()[0] == state.parents[1] / ".local" / "state" / "flowgrpo" / "trusted.jsonl"


def test_without_a_home_that_can_be_written_a_folder_of_the_user_takes_its_place(state: Path):
    state.parents[1].write_text("no folder")
    said = ledger.trust({"one": "first"})
    place = state.parents[2] / f"flowgrpo-{os.geteuid()}" / "trusted.jsonl"
    assert said is not None
    assert f"{state} cannot be written" in said
    assert f"{place} remembers" in said
    forget()
    assert ledger.trusted("one")
    place.parent.chmod(0o777)
    assert not ledger.trusted("one")
    assert "--trust" in str(ledger.trust({"two": "second"}))


def test_a_link_in_place_of_the_folder_of_the_user_counts_for_nothing(state: Path):
    state.parents[1].write_text("no folder")
    theirs = state.parents[2] / "theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "trusted.jsonl").write_text('{"digest": "one"}\n')
    (state.parents[2] / f"flowgrpo-{os.geteuid()}").symlink_to(theirs)
    assert not ledger.trusted("one")


def _write_many(number: int) -> None:
    for k in range(20):
        ledger.trust({f"{number}-{k}": "x" * 3000})


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(state: Path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    forget()
    assert all(ledger.trusted(f"{number}-{k}") for number in range(4) for k in range(20))
    assert len(state.read_text().splitlines()) == 80
