"""The papers' claims: which results are measured again, keys, intervals and verdicts by hand, figures, report."""

import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from flowgrpo.bench.claims import probes as claims_probes
from flowgrpo.bench.claims import results as claims_results
from flowgrpo.bench.claims.charts import CHARTS
from flowgrpo.bench.claims.evidence import (
    SCORE,
    Claim,
    Evidence,
    Interval,
    Statement,
    first_reach,
    kept_signal,
    lopsided,
)
from flowgrpo.bench.claims.gather import choose, claims, gather, settings_of
from flowgrpo.bench.claims.line_charts import Panel, Series, draw, ticks
from flowgrpo.bench.claims.report import Results, machines, table, write_report
from flowgrpo.bench.claims.results import Settings, claimed, find, key_of, stamp, write_result
from flowgrpo.bench.claims.rises import paired, rise_recipe
from flowgrpo.bench.claims.trainings import (
    Job,
    apart,
    diversity,
    find_run,
    jobs,
    measure_run,
    ratios_by_step,
    recipe_of,
    trained_on,
)
from flowgrpo.bench.claims.verdicts import CLAIMS, at_equal, at_equal_exploration, over_optimised, preferred
from flowgrpo.configs.load import dump_recipe, load_recipe, recipe_names
from flowgrpo.training.planning import planner

Result = dict[str, Any]
DEFAULT = Job("default", "default")


@pytest.fixture(scope="module")
def tiny(random_pipeline: Path) -> tuple[str, ...]:
    """Overrides that make every window recipe run in a second or so."""
    return (
        f"model.path={random_pipeline}",
        "sampler.steps=4",
        "sampler.plan.window={name: frozen, size: 2, start: 0}",
        "rollout={prompts: 2, group: 3, batch: 6, decode_batch: 6}",
        "rewards=[{name: jpeg_compressibility}]",
        "evaluate.prompts=2",
        "evaluate.steps=4",
        "run.checkpoint_every=1",
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[str, ...]) -> Settings:
    """A folder with the result of four iterations of the default."""
    settings = Settings(tmp_path_factory.mktemp("claims") / "results", (0,), 0.05, tiny)
    measure_run(settings, DEFAULT, 0, lambda text: None)
    return settings


def silent(text: str) -> None:
    """A `report` function that discards its lines."""


def timeless(result: Result) -> Result:
    """A result without the values that differ from run to run."""
    curves = {k: v for k, v in result["curves"].items() if not k.startswith("time/") and k != "seconds"}
    evaluation = {k: v for k, v in result["evaluation"].items() if k != "seconds"}
    return {"curves": curves, "evaluation": evaluation, "steps": result["steps"], "key": result["key"]}


# -- runs and their files ----------------------------------------------------------------------------------------------


def test_a_result_holds_what_was_spent_and_found(measured: Settings) -> None:
    result = find_run(measured, DEFAULT, 0)
    assert result is not None
    recipe = recipe_of(DEFAULT, 0, measured)
    counts = planner(recipe, load_recipe("default").sampler.sigmas or (1.0, 0.75, 0.5, 0.25, 0.0))(0).counts()
    curves, marks = result["curves"], result["evaluation"]
    assert curves["iteration"] == [0, 1, 2, 3]
    # 2 prompts, and nothing but the states of the plan and the reference: no evaluation, no check of the pipeline.
    assert [penalty.name for penalty in recipe.penalties] == ["kl"]
    assert curves["evaluations"] == [2 * counts.evaluations] * 4
    assert curves["forward"] == [2 * (counts.evaluations + counts.trained_states)] * 4
    assert curves["trained_states"] == [2 * counts.trained_states] * 4
    assert curves["trained_edges"] == [2 * counts.trained_edges] * 4
    unit = 2 * (counts.evaluations + counts.trained_states + 3 * counts.trained_states)
    assert marks["iteration"] == [0, 1, 2, 3, 4]
    assert marks["updates"] == [0, 1, 2, 3, 4]
    assert marks["compute"] == [unit * k for k in range(5)]
    assert {"gold", SCORE, "proxy", "diversity"} <= set(marks)
    assert all(value > 0 for value in marks["diversity"])
    assert set(result["steps"]) == {"0", "1"}
    assert result["images"] == 6
    assert result["code"] == stamp().code
    assert result["hardware"]["torch"] == torch.__version__


def test_a_result_that_is_there_is_not_made_again(measured: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("flowgrpo.bench.claims.trainings._train", refuse)
    measure_run(measured, DEFAULT, 0, silent)
    (file,) = measured.results.glob("*.json")
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(AssertionError, match="trained again"):
        measure_run(measured, DEFAULT, 0, silent)
    file.write_bytes(kept)


def test_an_interrupted_run_ends_in_the_result_of_an_unbroken_one(measured: Settings, tmp_path: Path) -> None:
    settings = dataclasses.replace(measured, results=tmp_path)

    def stop(text: str) -> None:
        if "after 2 iterations" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_run(settings, DEFAULT, 0, stop)
    assert find_run(settings, DEFAULT, 0) is None
    said: list[str] = []
    measure_run(settings, DEFAULT, 0, said.append)
    assert any("goes on before iteration 2" in text for text in said)
    broken, whole = find_run(settings, DEFAULT, 0), find_run(measured, DEFAULT, 0)
    assert broken is not None
    assert whole is not None
    assert timeless(broken) == timeless(whole)


def test_a_run_whose_gradient_is_not_finite_has_that_as_its_result(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise FloatingPointError("the gradient is not finite")

    monkeypatch.setattr("flowgrpo.bench.claims.trainings._train", broken)
    settings = Settings(tmp_path, (3,), 0.05, tiny)
    measure_run(settings, DEFAULT, 3, silent)
    found = gather(settings)
    assert found.evidence.failed == {"default": [3]}
    assert found.evidence.runs == {}
    write_report(found, tmp_path / "out")
    assert "default (seed 3)" in (tmp_path / "out" / "claims.md").read_text()


def test_the_key_is_of_all_that_shapes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(Path("nowhere"))

    def key(job: Job = DEFAULT, seed: int = 0, **changed: Any) -> str:
        return key_of([recipe_of(job, seed, dataclasses.replace(settings, **changed))])

    first = key()
    other = [key(seed=1), key(scale=2.0), key(overrides=("optimizer.learning_rate=1e-4",)), key(Job("m", "mixgrpo"))]
    assert len({first, *other}) == 5
    assert key(overrides=("paper=another", "name=another")) == first
    assert key(results=Path("elsewhere"), any_code=True, seeds=(5,)) == first
    assert key_of([recipe_of(DEFAULT, 0, settings)], "more") != first
    for change in ("version", "code", "data"):
        changed = dataclasses.replace(stamp(), **{change: "other"})
        with monkeypatch.context() as patch:
            patch.setattr(claims_results, "stamp", lambda changed=changed: changed)
            assert key() != first


def test_code_that_no_run_passes_through_is_not_in_the_key() -> None:
    def counted(path: str) -> bool:
        return not path.startswith(claims_results._NO_PART)

    assert counted("training/trainer.py")
    assert counted("core/objectives.py")
    assert not any(map(counted, ["cli/app.py", "gallery/build.py", "bench/claims/verdicts.py", "bench/measures.py"]))


def test_results_of_other_code_are_not_mixed_in_unless_asked_for(
    measured: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(measured, results=tmp_path)
    found = find_run(measured, DEFAULT, 0)
    assert found is not None
    # As an older schema wrote it, without a key of the present schema.
    stored = yaml.safe_load(found["recipes"][0])
    del stored["rollout"]["decode_batch"]
    found["recipes"] = [yaml.safe_dump(stored)]
    (tmp_path / found["file"]).write_text(json.dumps(found))
    exact = find_run(settings, DEFAULT, 0)
    assert exact is not None
    assert "other_code" not in exact
    monkeypatch.setattr(claims_results, "stamp", lambda: dataclasses.replace(stamp(), code="later"))
    assert find_run(settings, DEFAULT, 0) is None
    assert gather(settings).unused == [found["file"]]
    lenient = dataclasses.replace(settings, any_code=True)
    # decode_batch is 6 in the run and 32 by default, so the old recipe is another one.
    assert find_run(lenient, DEFAULT, 0) is None
    like_it = dataclasses.replace(lenient, overrides=(*settings.overrides, "rollout.decode_batch=32"))
    taken = find_run(like_it, DEFAULT, 0)
    assert taken is not None
    assert taken["other_code"]
    assert find_run(dataclasses.replace(like_it, any_code=False), DEFAULT, 0) is None
    assert find_run(dataclasses.replace(like_it, scale=1.0), DEFAULT, 0) is None
    written = write_report(gather(like_it), tmp_path / "out").read_text()
    assert "These results come from other code, with an equal recipe: default." in written


def test_a_broken_result_file_is_named(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    recipe = recipe_of(DEFAULT, 0, settings)
    (tmp_path / f"x-{key_of([recipe])}.json").write_text("{")
    with pytest.raises(ValueError, match="delete it"):
        find(settings, "x", [recipe])


def test_two_processes_do_not_do_the_same(tmp_path: Path, measured: Settings) -> None:
    with claimed(tmp_path / "new" / "lock") as first, claimed(tmp_path / "new" / "lock") as second:
        assert (first, second) == (True, False)
    with claimed(tmp_path / "new" / "lock") as again:
        assert again
    settings, said = dataclasses.replace(measured, results=tmp_path), []
    name = f"default-seed0-{key_of([recipe_of(DEFAULT, 0, settings)])}"
    with claimed(tmp_path / "runs" / f"{name}.lock"):
        measure_run(settings, DEFAULT, 0, said.append)
    assert said == ["default, seed 0: another process is making this run"]


def test_every_recipe_has_a_job_and_common_settings() -> None:
    settings = Settings(Path("nowhere"))
    known = jobs()
    assert set(recipe_names("images")) <= set(known)
    assert len(known) >= 12
    for job in known.values():
        recipe = recipe_of(job, 1, settings)
        assert recipe.run.iterations == 48 * job.length
        assert recipe.evaluate.every == 12 * job.length
        assert [r.label or r.name for r in recipe.evaluate.rewards or ()] == ["gold", SCORE, "proxy"]
        assert (recipe.run.seed, recipe.evaluate.seeds, recipe.evaluate.steps) == (1, 2, 10)


def test_every_recipe_is_read_back_from_its_result() -> None:
    """Also an interval with infinite bounds, for which JSON has no number."""
    settings = Settings(Path("nowhere"))
    for job in jobs().values():
        recipe = recipe_of(job, 0, settings)
        assert claims_results._contents([dump_recipe(recipe)]) == [claims_results.content(recipe)], job.label


def test_what_a_recipe_is_trained_on() -> None:
    assert trained_on(load_recipe("default")) == "gold_dense"
    judged = "rewards=[{name: win_rate, options: {judge: proxy}}, {name: jpeg_compressibility}]"
    assert trained_on(load_recipe("default", [judged])) == "win_rate by proxy, jpeg_compressibility"


# -- diversity and log-ratios ------------------------------------------------------------------------------------------


def test_diversity_of_images_made_by_hand(tmp_path: Path) -> None:
    # Prompt 4: black, white and grey of 0.2; prompt 7: two equal ones; prompt 9: one alone.
    levels = [(4, 0), (7, 100), (4, 255), (9, 3), (4, 51), (7, 100)]
    lines = []
    for number, (prompt, level) in enumerate(levels):
        Image.fromarray(np.full((4, 4, 3), level, dtype=np.uint8)).save(tmp_path / f"{number}.png")
        lines.append({"phase": "eval", "iteration": 20, "image": f"{number}.png", "prompt_id": prompt})
    lines.append({"phase": "train", "iteration": 0, "image": "0.png", "prompt_id": 1})
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"phase": "ev')
    # Distances 1, 0.2 and 0.8 have the mean 2/3; the second prompt has 0.
    assert diversity(tmp_path, "eval") == {20: pytest.approx((2 / 3 + 0) / 2)}
    assert diversity(tmp_path, "train") == {}


def test_the_order_of_images_does_not_change_diversity() -> None:
    images = torch.rand(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    owners = [0, 0, 1, 1, 1, 0]
    order = [3, 5, 0, 2, 4, 1]
    assert apart(images, owners) == pytest.approx(apart(images[order], [owners[k] for k in order]))


def test_log_ratios_are_pooled_over_iterations() -> None:
    one = {"count": 1.0, "log_ratio_mean": 0.0, "log_ratio_var": 1.0, "clip_share": 0.0}
    other = {"count": 3.0, "log_ratio_mean": 4.0, "log_ratio_var": 5.0, "clip_share": 1.0}
    empty = {"count": 0.0, "log_ratio_mean": None, "log_ratio_var": None, "clip_share": None}
    pooled = ratios_by_step([{"steps": {"10": one, "2": empty}}, {"steps": {"10": other, "2": one}}, {}])
    assert list(pooled) == ["2", "10"]
    # Second moments 1 and 21: (1 + 3 · 21) / 4 - 3² = 7.
    assert pooled["10"] == {"count": 4.0, "mean": 3.0, "var": 7.0, "clipped": 0.75}


# -- intervals and verdicts --------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    # Mean 2, deviation 1; Student's t at 0.975 with 2 degrees of freedom is 4.302653, over √3 is 2.484138.
    interval = Interval.of([1.0, 3.0, 2.0])
    assert interval.mean == 2.0
    assert interval.low == pytest.approx(2.0 - 2.484138, abs=1e-6)
    assert interval.high == pytest.approx(2.0 + 2.484138, abs=1e-6)
    assert interval.text(".2f") == "2.00 [−0.48, 4.48]"
    assert (interval.at_most(4.5), interval.at_most(2.0), interval.at_most(-0.5)) == (True, None, False)
    assert (interval.at_least(-0.5), interval.at_least(2.0), interval.at_least(4.5)) == (True, None, False)


def test_a_single_value_decides_nothing() -> None:
    interval = Interval.of([0.3])
    assert (interval.at_most(100.0), interval.at_least(-100.0)) == (None, None)
    assert interval.text() == "+0.300 (one value)"


def test_numbers_that_are_not_there_decide_nothing() -> None:
    interval = Interval.of([math.nan, math.nan])
    assert (interval.at_most(0.0), interval.at_least(0.0)) == (None, None)
    assert interval.text() == "no number"


def made(label: str, score: list[float], seed: int = 0, **changed: Any) -> Result:
    """A result of a run with `len(score)` evaluations, ten iterations apart."""
    places = [10 * k for k in range(len(score))]
    steps = {"0": {"count": 5.0, "mean": -1.0, "var": 4.0, "clipped": 0.0}}
    count = places[-1]
    marks = {"iteration": places, "updates": places, "compute": [100 * k for k in places], "seconds": places}
    marks |= {SCORE: score, "gold": score, "proxy": [s / 2 for s in score], "diversity": [0.2] * len(score)}
    curves = {"grad_norm": [1.0, 3.0, 2.0] * 2, "degenerate_groups": [0.5, 0.1, 0.2] * 2, "ratio/mean": [1.0] * 6}
    result: Result = {
        "kind": "run", "label": label, "method": label, "seed": seed, "key": "0", "file": f"{label}-{seed}",
        "recipes": [dump_recipe(load_recipe("default"))], "trained_on": "gold_dense",
        "version": "0", "code": "0", "data": "0",
        "hardware": {"cpu": "a cpu", "cores": 2, "threads": 1, "gpu": None, "torch": "2", "python": "3"},
        "iterations": count, "images": 96, "curves": curves, "evaluation": marks, "rollout_diversity": {"0": 0.1},
        "steps": steps, "totals": {"evaluations": 10 * count, "compute": 100 * count, "seconds": 2.0 * count},
    }  # fmt: skip
    return result | changed


def evidence(runs: dict[str, list[list[float]]], times: dict[str, tuple[float, ...]] | None = None) -> Evidence:
    """Evidence of held-out curves by label and seed, and of five timed iterations against 1 s of DanceGRPO."""
    found = {label: {k: made(label, c, k) for k, c in enumerate(curves)} for label, curves in runs.items()}
    timed = {
        name: made(name, [0.0, 0.0], seconds={name: list(values), "dance_grpo": [1.0] * len(values)})
        for name, values in (times or {}).items()
    }
    return Evidence(found, {}, timed, {})


def claim(name: str) -> Claim:
    return next(c for c in CLAIMS if c.name == name)


LEVEL = [[0.4, 0.5], [0.4, 0.51], [0.4, 0.49]]
HALF = (0.50, 0.51, 0.49, 0.50, 0.50)


@pytest.mark.parametrize(
    ("mix", "seconds", "verdict"),
    [
        (LEVEL, HALF, "reproduced"),
        ([[0.4, 0.45], [0.4, 0.46], [0.4, 0.44]], HALF, "not reproduced"),
        ([[0.4, 0.55], [0.4, 0.46], [0.4, 0.44]], HALF, "undecided"),
        (LEVEL, (0.7, 0.71, 0.69, 0.7, 0.7), "not reproduced"),
        (LEVEL, (0.3, 0.9, 0.4, 0.8, 0.5), "undecided"),
        (LEVEL[:1], HALF, "undecided"),
    ],
)
def test_verdicts_on_mixgrpo(mix: list[list[float]], seconds: tuple[float, ...], verdict: str) -> None:
    found = evidence({"mixgrpo": mix, "dance_grpo": LEVEL}, {"mixgrpo": seconds})
    assert claim("mixgrpo").answer(found)[0] == verdict


def test_what_is_missing_is_said() -> None:
    none = evidence({"mixgrpo": LEVEL})
    verdict, (finding,) = claim("mixgrpo").answer(none)
    assert verdict == "not measured"
    assert finding.text == "There is no result of dance_grpo, the timing of mixgrpo."
    apart_ = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    seeds = {"mixgrpo": {7: made("mixgrpo", [0.4, 0.5])}, "dance_grpo": dict(apart_.runs["dance_grpo"])}
    verdict, _ = claim("mixgrpo").answer(dataclasses.replace(apart_, runs=seeds))
    assert verdict == "not measured"


def test_only_seeds_that_both_have_are_compared() -> None:
    found = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    more = {**found.runs, "mixgrpo": {**found.runs["mixgrpo"], 3: made("mixgrpo", [0.4, 0.0], 3)}}
    assert claim("mixgrpo").answer(dataclasses.replace(found, runs=more))[0] == "reproduced"


def test_a_method_that_ended_early_reproduces_nothing() -> None:
    found = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    verdict, findings = claim("mixgrpo").answer(dataclasses.replace(found, failed={"mixgrpo": [4, 5]}))
    assert verdict == "undecided"
    assert findings[-1].text == "mixgrpo ended early on seed 4, 5."


def test_a_note_tests_nothing() -> None:
    found = evidence({"mixgrpo": LEVEL})
    rests = [Statement("good", True), Statement("by the way", False, note=True)]
    assert Claim("x", "X", "says", lambda e: rests, runs=("mixgrpo",)).answer(found)[0] == "reproduced"


def test_scores_are_compared_where_both_have_spent_the_same() -> None:
    # The faster has 0.5 after 10 iterations; the slower 0.42, 0.44 after 20.
    found = evidence({"one": [[0.4, 0.5]] * 2, "other": [[0.4, 0.42, 0.44]] * 2})
    finding, note = at_equal(found, "one", "other", "updates")
    assert "at equal updates (10): +0.080" in finding.text
    assert finding.holds
    # 0.44 is four tenths of the way to 0.5: after 4 of the other's 20.
    assert "gained on 2 of 2 seeds" in note.text
    assert "final score on 2 of these seeds, with 0.20 times the updates" in note.text
    back, _ = at_equal(found, "other", "one", "updates")
    assert back.holds is False


def test_the_first_place_where_a_target_is_reached() -> None:
    run = made("x", [0.4, 0.3, 0.5, 0.45])
    assert first_reach(run, "iteration", 0.45) == pytest.approx(17.5)
    assert first_reach(run, "compute", 0.4) == 0.0
    assert first_reach(run, "iteration", 0.6) is None


def test_over_optimisation_needs_a_fall_to_guard_against() -> None:
    plain, guard = "flow_grpo+proxy", "grpo_guard+proxy"
    falls = evidence({plain: [[0.4, 0.30], [0.4, 0.31]], guard: [[0.4, 0.42], [0.4, 0.421]]})
    assert all(f.holds for f in over_optimised(falls) if not f.note)
    holds = evidence({plain: [[0.4, 0.41], [0.4, 0.411]], guard: [[0.4, 0.42], [0.4, 0.421]]})
    assert [f.holds for f in over_optimised(holds) if not f.note] == [True, True, False, True]


def test_log_ratios_to_one_side() -> None:
    steps = {"0": {"mean": -1.0, "var": 4.0}, "1": {"mean": 3.0, "var": 1.0}, "2": {"mean": 0.0, "var": 0.0}}
    assert lopsided({"steps": steps}) == pytest.approx((0.5 + 3.0) / 2)
    assert math.isnan(lopsided({"steps": {}}))


def test_signal_is_compared_between_iterations_with_few_and_many_degenerate_groups() -> None:
    curves = {
        "degenerate_groups": [0.9, 0.0, 0.5, None, 0.8, 0.1, 0.4],
        "grad_norm": [1.0, 4.0, 9.0, 9.0, 3.0, 6.0, 9.0],
    }
    assert kept_signal({"curves": curves}) == pytest.approx((1.0 + 3.0) / (4.0 + 6.0))


def test_equal_exploration_is_compared_where_both_kernels_are() -> None:
    entries = {
        "sage": [{"diversity": [0.1], SCORE: [0.5]}, {"diversity": [0.3], SCORE: [0.3]}],
        "flow_sde": [{"diversity": [0.4], SCORE: [0.1]}, {"diversity": [0.2], SCORE: [0.3]}],
        "cps": [{"diversity": [0.5], SCORE: [0.1]}, {"diversity": [0.6], SCORE: [0.0]}],
    }
    # Between 0.2 and 0.3 sage goes from 0.4 to 0.3, flow_sde from 0.3 to 0.2.
    assert at_equal_exploration(entries, "sage", "flow_sde", 0) == pytest.approx(0.1)
    assert at_equal_exploration(entries, "sage", "cps", 0) is None


# -- timing and probes -------------------------------------------------------------------------------------------------


class FakeTrainer:
    """Records the number of each iteration that it is asked for, in order."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name, self.asked, self.clock = name, asked, self

    def lap(self) -> None:
        """Nothing to wait for."""

    def iterate(self, number: int) -> None:
        """One iteration."""
        self.asked.append((self.name, number))


def test_timed_iterations_take_turns_and_span_the_run() -> None:
    asked: list[tuple[str, int]] = []
    trainers: dict[str, Any] = {name: FakeTrainer(name, asked) for name in ("one", "two")}
    figures = claims_probes.interleaved(trainers, 100)
    assert figures["iterations"] == [10, 30, 50, 70, 90]
    assert asked[:4] == [("one", 10), ("two", 10), ("two", 30), ("one", 30)]
    assert all(len(seconds) == 5 for seconds in figures["seconds"].values())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes with little work, all with a recipe that exists."""
    monkeypatch.setattr(claims_probes, "REPEATS", 2)
    monkeypatch.setattr(claims_probes, "EXPLORED", 1)
    monkeypatch.setattr(claims_probes, "DRAWN", 3)
    monkeypatch.setattr(claims_probes, "ETAS", {"flow_sde": (0.1, 0.7), "sage": (0.7,)})
    for name, probe in list(claims_probes.PROBES.items()):
        monkeypatch.setitem(claims_probes.PROBES, name, dataclasses.replace(probe, method="flow_grpo"))


@pytest.mark.usefixtures("quick")
def test_everything_about_one_method_is_measured_once(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path / "results", (0,), 0.05, tiny)
    names = ["default", "mixgrpo", *claims_probes.PROBES]
    said: list[str] = []
    claims(settings, names, tmp_path / "out", said.append)
    found = gather(settings)
    assert {label: set(runs) for label, runs in found.evidence.runs.items()} == {"default": {0}, "mixgrpo": {0}}
    assert len(claims_probes.baselines()) == 2
    times = found.evidence.times
    assert {method: set(timed["seconds"]) for method, timed in times.items()} == {
        method: {method, *claims_probes.baselines()} for method in ("default", "mixgrpo")
    }
    # They took turns with the same iterations of the baseline.
    assert times["default"]["seconds"]["flow_grpo"] == times["mixgrpo"]["seconds"]["flow_grpo"]
    assert "0 of 2 runs have results; by the timings, the others need about" in "\n".join(said)

    explored = found.evidence.probes["exploration"]["kernels"]
    assert [entry["eta"] for entry in explored["flow_sde"]] == [0.1, 0.7]
    quiet, loud = explored["flow_sde"]
    assert all(a < b for a, b in zip(quiet["diversity"], loud["diversity"], strict=True))
    squared = found.evidence.probes["gradient_variance"]["squared"]
    # The group's mean shrinks the leave-one-out gradient by (G - 1)/G, here 2/3, and its variance by the square.
    assert sum(squared["mean"]) == pytest.approx(sum(squared["loo"]) * 4 / 9, rel=1e-3)
    assert sum(squared["loo"]) < sum(squared["none"])
    spread = found.evidence.probes["gradient_spread"]["by_step"]
    assert len(spread["plain"]) == 1
    # A probe of other code is taken only if it has the seeds of the settings.
    lenient = dataclasses.replace(settings, any_code=True)
    with monkeypatch.context() as later:
        later.setattr(claims_probes, "_probe_code", lambda: "later")
        taken = claims_probes.find_probe(lenient, "exploration")
        assert taken is not None
        assert taken["other_code"]
        assert claims_probes.find_probe(dataclasses.replace(lenient, seeds=(0, 1)), "exploration") is None

    def refuse(*args: Any) -> None:
        raise AssertionError("measured again")

    rise = found.rises["mixgrpo"]
    assert set(found.rises) == {"default", "mixgrpo"}
    assert (rise["iterations"], rise["images"]) == (1, 2)
    assert rise["before"] > 0
    assert "| mixgrpo | 1 |" in (tmp_path / "out" / "claims.md").read_text(encoding="utf-8").partition("raises its")[2]
    assert not found.unused

    for place in ("trainings._train", "probes._loaded", "rises._rise"):
        monkeypatch.setattr(f"flowgrpo.bench.claims.{place}", refuse)
    claims(settings, names, tmp_path / "out", said.append)
    assert "2 of 2 runs have results" in "\n".join(said)


def test_a_rise_is_of_pairs_with_the_same_prompt_and_noise(tmp_path: Path) -> None:
    def line(iteration: int, prompt: int, kilobytes: float, phase: str = "eval") -> str:
        rewards = {"jpeg_compressibility": -kilobytes / 500}
        record = {"phase": phase, "iteration": iteration, "prompt_id": prompt, "seed": 0, "rewards": rewards}
        return json.dumps(record) + "\n"

    lines = [line(0, 0, 2.0), line(0, 1, 4.0), line(0, 0, 9.0, "train"), line(8, 1, 3.0), line(8, 0, 1.5)]
    (tmp_path / "index.jsonl").write_text("".join(lines), encoding="utf-8")
    found = paired(tmp_path, 8)
    assert (found["images"], found["iterations"]) == (2, 8)
    assert found["before"] == pytest.approx(3.0)
    assert found["after"] == pytest.approx(2.25)
    # Differences −0.5 and −1.
    assert found["error"] == pytest.approx(0.25)


def test_every_recipe_has_a_short_run_on_small_files(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    for name in jobs():
        if "+" not in name:
            recipe = rise_recipe(settings, name)
            [reward] = recipe.rewards
            assert (reward.name, reward.weight) == ("jpeg_compressibility", 500.0) or name == "pref_grpo"
    assert rise_recipe(settings, "pref_grpo").rewards[0].options == {"judge": "jpeg_compressibility"}


# -- figures and report ------------------------------------------------------------------------------------------------


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_figure_is_well_formed_and_says_what_is_on_it() -> None:
    series = [Series("a < b & c", [0, 1, 2], [1.0, None, 3.0]), Series("seed", [0, 2], [1.0, math.nan], faint=True)]
    root = parsed(draw('"title"', [Panel("left", "x", series), Panel("right", "x", [])]))
    said = texts(root)
    assert {'"title"', "left", "right", "a < b & c", "nothing measured", "x"} <= set(said)
    lines = [node.attrib["points"] for node in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points.split()) for points in lines] == [2, 1]
    assert "prefers-color-scheme:dark" in draw("x", [])


def test_a_line_goes_where_its_values_are() -> None:
    root = parsed(draw("t", [Panel("p", "x", [Series("s", [0, 1, 2], [0.0, 5.0, 10.0])])]))
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[1] == pytest.approx([(a + b) / 2 for a, b in zip(points[0], points[2])], abs=0.06)
    assert points[0][0] < points[2][0]
    assert points[0][1] > points[2][1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-1.1, 1.1, ["−1.0", "−0.5", "0.0", "0.5", "1.0"]),
        (0.0, 4e5, ["0", "1e+05", "2e+05", "3e+05", "4e+05"]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[str]) -> None:
    assert [text for _, text in ticks(low, high)] == expected


def whole() -> Evidence:
    """Results of everything that a claim needs."""
    labels = {label for c in CLAIMS for label in c.runs}
    found = evidence(dict.fromkeys(sorted(labels), LEVEL), {name: HALF for c in CLAIMS for name in c.times})
    kernel = [{"eta": e, "diversity": [e, e + 0.01], SCORE: [0.5, 0.4], "proxy": [0.1, 0.2]} for e in (0.1, 0.3)]
    variances = {"none": [3.0, 2.0], "mean": [1.0, 1.0], "loo": [1.5, 1.4]}
    probes = {
        "exploration": {"kernels": dict.fromkeys(("flow_sde", "dance_sde", "cps", "sage"), kernel)},
        "gradient_variance": {"squared": variances, "mean_squared": dict.fromkeys(variances, 0.1)},
        "gradient_spread": {"by_step": {"plain": [[1.0, 4.0], [1.0, 5.0]], "guard": [[1.0, 1.1], [1.0, 1.0]]}},
    }
    head = made("probe", [0.0, 0.0])
    return dataclasses.replace(found, probes={name: head | probe for name, probe in probes.items()})


def test_a_report_answers_every_claim(tmp_path: Path) -> None:
    settings, results = Settings(tmp_path / "results", overrides=("optimizer.learning_rate=1e-3",)), whole()
    used = [run for runs in results.runs.values() for run in runs.values()]
    labels = list(results.runs)
    page = write_report(Results(settings, results, used, ["old.json"], labels), tmp_path / "out").read_text()
    data = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert [c["name"] for c in data["claims"]] == [c.name for c in CLAIMS] == list(CHARTS)
    assert "not measured" not in {c["verdict"] for c in data["claims"]}
    assert data["unused"] == ["old.json"]
    assert data["command"] == "flowgrpo bench claims optimizer.learning_rate=1e-3 --seeds 0,1,2 --scale 1"
    assert data["hardware"] == ["1 thread(s) on 2 cores of a cpu, torch 2"]
    row = data["methods"]["mixgrpo"]
    assert row[SCORE]["mean"] == pytest.approx(0.5)
    assert row[SCORE]["high"] == pytest.approx(0.5 + 2.484138 * 0.01, abs=1e-6)
    assert row["time_dance_grpo"]["mean"] == pytest.approx(0.5)
    assert row["compute"] == 100.0
    assert row["over_flow_grpo"]["mean"] == pytest.approx(0.0)
    assert "0.500 [0.475, 0.525]" in page
    # 2 s for each of ten iterations.
    assert f"The {len(used)} runs trained for {len(used) * 20 / 3600:.1f} hours in all" in page
    for c in CLAIMS:
        assert f"## {c.paper}: {c.name}\n" in page
        assert texts(parsed((tmp_path / "out" / "claims" / f"{c.name}.svg").read_text()))
    pictures = sorted(path.name for path in (tmp_path / "out" / "claims").glob("all-*.svg"))
    legends = [texts(parsed((tmp_path / "out" / "claims" / name).read_text())) for name in pictures]
    assert all({"dance_grpo", "flow_grpo"} <= set(legend) for legend in legends)
    assert all(sum(label in legend for legend in legends) == 1 for label in set(labels) - {"dance_grpo", "flow_grpo"})
    assert all(f"(claims/{name})" in page for name in pictures)
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    assert sum(line.startswith("| mixgrpo |") for line in tables) == 3


def test_methods_are_compared_with_the_default_at_what_the_cheapest_spends() -> None:
    # The default ends at 1000 units with 0.5; the others have come half way there.
    steady, falling = [[0.4, 0.45, 0.5], [0.4, 0.5, 0.6]], [[0.4, 0.38, 0.2], [0.4, 0.36, 0.2]]
    results = evidence(
        {"default": [[0.4, 0.5], [0.4, 0.52]], "steady": steady, "falling": falling, "awm": [[0.4, 0.5]]}
    )
    used = [run for runs in results.runs.values() for run in runs.values()]
    rows = table(Results(Settings(Path("nowhere")), results, used, [], list(results.runs)))
    assert {row["budget"] for row in rows.values()} == {1000.0}
    assert rows["default"]["over_default_there"] is None
    leads = {name: row["over_default_there"].mean for name, row in rows.items() if name != "default"}
    assert leads == pytest.approx({"steady": (-0.05 - 0.02) / 2, "falling": (-0.12 - 0.16) / 2, "awm": 0.0})


def test_links_to_the_claims_lead_to_their_headings(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "results")
    page = write_report(Results(settings, Evidence({}, {}, {}, {}), [], []), tmp_path / "out").read_text()
    assert page.count("**not measured**") == len(CLAIMS)
    assert not (tmp_path / "out" / "claims" / "mixgrpo.svg").exists()
    for c in CLAIMS:
        heading = f"{c.paper}: {c.name}".lower()
        anchor = "".join(ch for ch in heading if ch.isalnum() or ch in "- ").replace(" ", "-")
        assert f"(#{anchor})" in page


def test_two_machines_are_both_named() -> None:
    one = made("x", [0.0, 0.0])
    gpu = made("x", [0.0, 0.0], hardware={**one["hardware"], "gpu": "a gpu"})
    assert machines([one, one, gpu]) == ["1 thread(s) on 2 cores of a cpu, torch 2", "a gpu, torch 2"]


def test_win_rates_are_compared_with_scores_of_one_recipe() -> None:
    gold = {"pref_grpo+proxy": [[0.4, 0.5], [0.4, 0.501]], "pref_grpo+pointwise": [[0.4, 0.42], [0.4, 0.421]]}
    first, *notes = preferred(evidence(gold))
    assert first.holds
    assert all(note.note for note in notes)


# -- the command -------------------------------------------------------------------------------------------------------


def test_words_of_the_command() -> None:
    words = ["mixgrpo", "run.iterations=5", "flow_grpo+proxy"]
    settings, names = settings_of(Path("r"), words, "0, 2,2", 0.5, True)
    assert settings == Settings(Path("r"), (0, 2), 0.5, ("run.iterations=5",), True)
    assert names == ["mixgrpo", "flow_grpo+proxy"]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: settings_of(Path("r"), [], "0;1", 1.0, False), "write numbers with commas"),
        (lambda: settings_of(Path("r"), [], "", 1.0, False), "write numbers with commas"),
        (lambda: settings_of(Path("r"), [], "0", 0.0, False), "use a number above 0"),
        (lambda: choose(["mixgrp"]), "no method 'mixgrp'"),
    ],
)
def test_what_is_wrong_with_the_command_is_said(make: Callable[[], Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make()


def test_a_method_brings_its_variants_and_a_variant_comes_alone() -> None:
    assert [job.label for job in choose(["flow_grpo"])[0]] == ["flow_grpo", "flow_grpo+proxy"]
    chosen, probed = choose(["flow_grpo+proxy", "exploration"])
    assert [job.label for job in chosen] == ["flow_grpo+proxy"]
    assert probed == ["exploration"]
    everything, _ = choose([])
    assert len(everything) == len(jobs())


def test_a_result_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_result(tmp_path / "new" / "x.json", {"value": math.nan})
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.slow
def test_the_results_on_record_are_found_and_make_the_report_on_record(tmp_path: Path) -> None:
    """The recipes in the results follow the present schema; otherwise everything would be measured again."""
    record = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
    settings = Settings(record / "claims", any_code=True)
    found = gather(settings)
    assert (len(found.used), list(found.unused)) == (len(list(settings.results.glob("*.json"))), [])
    assert set(found.labels) == set(jobs())
    assert set(found.rises) == set(found.evidence.times) == {job.method for job in jobs().values()}
    text = write_report(found, tmp_path).read_text(encoding="utf-8")
    lines, known = (
        [line for line in page.splitlines() if not line.startswith(("Run on: ", "These results come from other code"))]
        for page in (text, (record / "claims.md").read_text(encoding="utf-8"))
    )
    assert lines == known
