"""Result files that are damaged, or have the name of another result: which are refused, and which are passed over."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowgrpo.bench.claims.gather import gather
from flowgrpo.bench.claims.report import write_report
from flowgrpo.bench.claims.results import Settings, key_of, read_result, write_result
from flowgrpo.bench.claims.trainings import DENSE, find_run, jobs, recipe_of
from flowgrpo.bench.race.race_report import race
from flowgrpo.bench.race.race_runs import DEFAULT, Entry, RaceSettings, find_entry, race_recipe
from flowgrpo.cli.app import app
from flowgrpo.configs.load import dump_recipe
from tests.bench.made_results import made, timing

Result = dict[str, Any]
Damage = Callable[[Result], Any]
RECORD = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
FLOW = jobs()["flow_grpo"]
SCORES = [0.4, 0.5, 0.55]


def a_run(settings: Settings, seed: int) -> tuple[Path, Result]:
    """A made run of Flow-GRPO for claims, and its file."""
    recipe = recipe_of(FLOW, seed, settings)
    key = key_of([recipe])
    result = made("flow_grpo", SCORES, seed, key=key, recipes=[dump_recipe(recipe)])
    return settings.results / f"flow_grpo-seed{seed}-{key}.json", result


def a_race(settings: Settings, seed: int) -> tuple[Path, Result]:
    """A made run of the race's default, and its file."""
    recipe, entry = race_recipe(Entry(DEFAULT, None, seed), settings), Entry(DEFAULT, None, seed)
    key = key_of([recipe])
    result = made(DEFAULT, SCORES, seed, kind="race", rate=None, key=key, recipes=[dump_recipe(recipe)])
    return settings.results / f"{entry.prefix}-{key}.json", result


def at(*place: Any, put: Any) -> Damage:
    """A change that puts a value at a place of a result."""

    def change(result: Result) -> None:
        for name in place[:-1]:
            result = result[name]
        result[place[-1]] = put

    return change


def without(name: str, inner: str = "") -> Damage:
    """A change that takes a key out of a result."""
    return lambda result: result[name].pop(inner) if inner else result.pop(name)


DAMAGES: list[tuple[Damage, str]] = [
    (without("hardware"), "hardware is missing or is not an object"),
    (without("hardware", "gpu"), "hardware.gpu is missing"),
    (without("recipes"), "recipes is missing or is not a list of texts"),
    (without("kind"), "kind and label name no measurement"),
    (without("label"), "label is missing or is not a text"),
    (without("evaluation"), "evaluation is missing or is not an object"),
    (without("evaluation", "compute"), "evaluation.compute is missing"),
    (without("totals"), "totals is missing or is not an object"),
    (at("totals", "seconds", put=None), "totals.seconds is missing or is not a finite number"),
    (at("iterations", put=0), "iterations is missing or is not a whole number of 1 or more"),
    (at("images", put=True), "images is missing or is not a whole number of 0 or more"),
    (at("evaluation", "paint", put=SCORES[:2]), "evaluation.paint has 2 values, and evaluation.iteration has 3"),
    (at("evaluation", "seconds", 1, put=0.0), "evaluation.seconds does not rise"),
    (at("evaluation", "compute", 0, put=-1.0), "evaluation.compute does not rise"),
    (at("evaluation", "gold", put="0.5"), "evaluation.gold is missing or is not a list"),
    (at("evaluation", put={name: [] for name in made("x", SCORES)["evaluation"]}), "does not rise over two or more"),
    (at("seed", put=0), "it holds the result of seed 0"),
    (at("key", put="0123456789"), "it holds the result with the key 0123456789"),
    (at("label", put="awm"), "it holds a result whose name begins with"),
    (at("failed", put=1), "failed is not a text"),
]
OF_CLAIMS: list[tuple[Damage, str]] = [
    (at("evaluation", "paint", 1, put=None), "evaluation.paint has no finite number at place 2"),
    (at("evaluation", "paint", 2, put=float("nan")), "evaluation.paint has no finite number at place 3"),
    (without("evaluation", "updates"), "evaluation.updates is missing"),
    (without("trained_on"), "trained_on is missing or is not a text"),
    (at("steps", "0", put={"mean": 0.0, "var": 1.0}), "steps.0.clipped is missing or is not a finite number"),
    (at("steps", "first", put={}), "steps.first is not the number of a step"),
]
OF_THE_RACE: list[tuple[Damage, str]] = [
    (at("evaluation", "gold", 0, put=None), "evaluation.gold has no finite number at place 1"),
    (at("evaluation", "gold", 2, put=10**400), "evaluation.gold has no finite number at place 3"),
]


def damaged(path: Path, result: Result, damage: Damage) -> Path:
    """The file of a result after a change."""
    changed = json.loads(json.dumps(result))
    damage(changed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(changed), encoding="utf-8")
    return path


@pytest.mark.parametrize(("damage", "reason"), [*DAMAGES, *OF_CLAIMS])
def test_a_damaged_run_of_claims_is_named(tmp_path: Path, damage: Damage, reason: str) -> None:
    settings = Settings(tmp_path)
    path, result = a_run(settings, 1)
    write_result(path, result)
    assert find_run(settings, FLOW, 1) == result | {"file": path.name}
    damaged(path, result, damage)
    with pytest.raises(ValueError, match="remove the file and run the command again") as refused:
        gather(settings)
    assert str(path) in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("damage", "reason"), [*DAMAGES, *OF_THE_RACE])
def test_a_damaged_run_of_the_race_is_named(tmp_path: Path, damage: Damage, reason: str) -> None:
    settings = RaceSettings(tmp_path)
    path, result = a_race(settings, 1)
    write_result(path, result)
    assert find_entry(settings, Entry(DEFAULT, None, 1)) == result | {"file": path.name}
    damaged(path, result, damage)
    with pytest.raises(ValueError, match="remove the file and run the command again") as refused:
        race(settings, [DEFAULT], tmp_path / "out", lambda text: None, only_report=True)
    assert str(path) in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"{", b'{"a": "\xff"}', b"[" * 100_000, b'"text"'])
@pytest.mark.parametrize("name", ["claims", "race"])
def test_a_file_without_a_result_is_named_by_the_command(tmp_path: Path, name: str, text: bytes) -> None:
    path, _ = (a_run if name == "claims" else a_race)(RaceSettings(tmp_path / "results"), 1)
    path.parent.mkdir()
    path.write_bytes(text)
    words = ["bench", name, *([DEFAULT] if name == "race" else []), "--report-only"]
    outcome = CliRunner().invoke(app, [*words, "--results", str(path.parent), "--out", str(tmp_path / "out")])
    assert outcome.exit_code
    assert isinstance(outcome.exception, ValueError | SystemExit)
    assert f"{path} is damaged or is not this result" in str(outcome.exception) + outcome.output


def test_a_copy_for_another_seed_is_not_counted(tmp_path: Path) -> None:
    settings = RaceSettings(tmp_path, (0, 1))
    (path, result), (other, _) = a_race(settings, 0), a_race(settings, 1)
    write_result(path, result)
    shutil.copy(path, other)
    with pytest.raises(ValueError, match="it holds the result of seed 0"):
        race(settings, [DEFAULT], tmp_path / "out", lambda text: None, only_report=True)


def test_a_score_besides_the_main_one_may_be_unknown(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "results")
    path, result = a_run(settings, 0)
    damaged(path, result, at("evaluation", DENSE, 2, put=None))
    write_report(gather(settings), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "claims.json").read_text())["runs"]["flow_grpo"]["seeds"] == [0]


def test_a_failed_run_needs_no_evaluation(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    path, result = a_run(settings, 0)
    kept = {k: v for k, v in result.items() if k not in ("evaluation", "totals", "iterations", "images", "steps")}
    write_result(path, kept | {"failed": "a gradient is not finite"})
    assert gather(settings).evidence.failed == {"flow_grpo": [0]}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"x": ',
        json.dumps(made(DEFAULT, SCORES, 1, kind="race", recipes=["a: [1"], key="a" * 10)),
        json.dumps(made(DEFAULT, SCORES, 1, kind="race", recipes=["evaluate: null"], key="a" * 10)),
        json.dumps(made(DEFAULT, SCORES, 1, kind="race", recipes=["- 1"], key="a" * 10)),
    ],
)
def test_a_damaged_file_of_other_code_is_passed_over(tmp_path: Path, text: str) -> None:
    settings = RaceSettings(tmp_path / "results", (0, 1), any_code=True)
    path, result = a_race(settings, 0)
    write_result(path, result)
    other = settings.results / f"race-default-seed1-{'a' * 10}.json"
    other.write_text(text, encoding="utf-8")
    race(settings, [DEFAULT], tmp_path / "out", lambda line: None, only_report=True)
    data = json.loads((tmp_path / "out" / "race.json").read_text())
    assert data["recipes"][DEFAULT]["seeds"] == [0]
    whole = text.startswith('{"kind"')
    assert data["unused"] == ([] if whole else [other.name])
    page = (tmp_path / "out" / "race.md").read_text()
    assert (f"not used; remove them: {other.name}." in page) is not whole


def test_a_damaged_file_of_other_code_is_among_the_unused_of_claims(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "results", any_code=True)
    path, result = a_run(settings, 0)
    write_result(path, result)
    (settings.results / f"flow_grpo-seed1-{'a' * 10}.json").write_text("[]", encoding="utf-8")
    found = gather(settings)
    assert list(found.evidence.runs["flow_grpo"]) == [0]
    assert found.unused == [f"flow_grpo-seed1-{'a' * 10}.json"]
    assert "1 result files are damaged or of other code" in write_report(found, tmp_path / "out").read_text()


# -- timings, probes and short runs ------------------------------------------------------------------------------------

TIMING = timing("mixgrpo", {"mixgrpo": (0.5, 0.5)})
TIMING["recipes"] *= len(TIMING["seconds"])
PROBE = made("exploration", SCORES, kind="probe", kernels={"sage": [{"eta": 0.3, "diversity": [0.1, 0.2]}]})
RISE = made("awm", SCORES, kind="rise", before=2.0, after=1.0, error=0.1)


@pytest.mark.parametrize(
    ("file", "result", "damage", "reason"),
    [
        ("time-mixgrpo", TIMING, without("seconds", "mixgrpo"), "seconds has 9 forms, and recipes has 10"),
        ("time-mixgrpo", TIMING, at("seconds", "mixgrpo", put=[]), "seconds.mixgrpo does not have numbers above 0"),
        ("time-mixgrpo", TIMING, at("seconds", "mixgrpo", 0, put=None), "seconds.mixgrpo has no finite number at"),
        ("time-mixgrpo", TIMING, at("seconds", "mixgrpo", put=[1.0]), "seconds.mixgrpo has 1 values"),
        ("time-mixgrpo", TIMING, at("passes", put=7), "passes does not divide the number of seconds"),
        ("time-mixgrpo", TIMING, without("nfe", "mixgrpo"), "nfe.mixgrpo is missing or is not an object"),
        ("probe-exploration", PROBE, without("kernels"), "kernels is missing or is not a finite number"),
        ("probe-exploration", PROBE, at("kernels", "sage", put=[]), "kernels.sage is empty"),
        (
            "probe-exploration", PROBE, at("kernels", "sage", 0, "diversity", 1, put=None),
            "kernels.sage.1.diversity.2 is missing or is not a finite number",
        ),
        ("probe-exploration", PROBE, at("label", put="x"), "kind and label name no measurement"),
        ("awm-rise", RISE, without("before"), "before is missing or is not a finite number"),
        ("default-rise", RISE, lambda result: None, "it holds a result whose name begins with awm-rise-"),
    ],
)  # fmt: skip
def test_what_is_damaged_in_other_measurements_is_named(
    tmp_path: Path, file: str, result: Result, damage: Damage, reason: str
) -> None:
    stored = {k: v for k, v in result.items() if k not in ("key", "seed", "file")}
    path = tmp_path / f"{file}-{'a' * 10}.json"
    if file != "default-rise":
        write_result(path, stored)
        assert read_result(path)["label"] == result["label"]
    damaged(path, stored, damage)
    with pytest.raises(ValueError, match="remove the file and run the command again") as refused:
        read_result(path)
    assert reason in str(refused.value)


def test_every_result_on_record_is_read() -> None:
    paths = [*(RECORD / "claims").glob("*.json"), *(RECORD / "race").glob("**/results/*.json")]
    assert len(paths) > 200
    assert all(read_result(path)["file"] == path.name for path in paths)
