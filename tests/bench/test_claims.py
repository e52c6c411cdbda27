"""The runs, timings and probes behind the papers' claims: which results are made again, keys, and what they hold."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from flowgrpo.bench.claims import gather as claims_gather
from flowgrpo.bench.claims import probes as claims_probes
from flowgrpo.bench.claims import results as claims_results
from flowgrpo.bench.claims import timings as claims_timings
from flowgrpo.bench.claims.claim_tables import NO_RISE
from flowgrpo.bench.claims.forms import FORMS
from flowgrpo.bench.claims.gather import claims, gather
from flowgrpo.bench.claims.metering import Meter
from flowgrpo.bench.claims.probes import toward_means
from flowgrpo.bench.claims.report import write_report
from flowgrpo.bench.claims.results import Settings, claimed, find, key_of, stamp, write_result
from flowgrpo.bench.claims.rises import paired, rise_recipe
from flowgrpo.bench.claims.timings import AGAIN, APART, FAMILIES, interleaved, shares_of_time, timed
from flowgrpo.bench.claims.trainings import (
    DENSE,
    EVALUATED,
    HELD_OUT,
    ITERATIONS,
    PAINT,
    Job,
    apart,
    find_run,
    jobs,
    json_lines,
    measure_run,
    ratios_by_step,
    recipe_of,
    trained_on,
)
from flowgrpo.bench.claims.verdicts import GUARDED
from flowgrpo.configs.load import dump_recipe, load_recipe, recipe_names
from flowgrpo.parts.traits import trained
from flowgrpo.training.planning import planner

Result = dict[str, Any]
FLOW = jobs()["flow_grpo"]


@pytest.fixture(scope="module")
def tiny(random_pipeline: Path) -> tuple[str, ...]:
    """Overrides that make every form with a window run in a second or so."""
    return (
        f"model.path={random_pipeline}",
        "sampler.steps=4",
        "sampler.plan.window={name: frozen, size: 2, start: 0}",
        "rollout={prompts: 2, group: 3, batch: 6, decode_batch: 6}",
        "optimizer.updates=1",
        "rewards=[{name: jpeg_compressibility}]",
        "evaluate.prompts=2",
        "evaluate.steps=4",
        "run.checkpoint_every=1",
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[str, ...]) -> Settings:
    """A folder with the result of four iterations of Flow-GRPO."""
    settings = Settings(tmp_path_factory.mktemp("claims") / "results", (0,), 0.5, tiny)
    measure_run(settings, FLOW, 0, lambda text: None)
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
    result = find_run(measured, FLOW, 0)
    assert result is not None
    recipe = recipe_of(FLOW, 0, measured)
    counts = planner(recipe, load_recipe("mixgrpo_flash_guard").sampler.sigmas or (1.0, 0.75, 0.5, 0.25, 0.0))(
        0
    ).counts()
    curves, marks = result["curves"], result["evaluation"]
    assert curves["iteration"] == [0, 1, 2, 3]
    # 2 prompts, and nothing but the states of the plan and the reference: no evaluation, no check of the pipeline.
    assert [penalty.name for penalty in recipe.penalties] == ["kl"]
    assert curves["evaluations"] == [2 * counts.evaluations] * 4
    assert curves["forward"] == [2 * (counts.evaluations + counts.trained_states)] * 4
    assert curves["trained_states"] == [2 * counts.trained_states] * 4
    assert curves["trained_edges"] == [2 * counts.trained_edges] * 4
    unit = 2 * (counts.evaluations + counts.trained_states + 3 * counts.trained_states)
    assert marks["iteration"] == [0, 2, 4]
    assert marks["updates"] == [0, 2, 4]
    assert marks["compute"] == [unit * k for k in (0, 2, 4)]
    assert {"gold", DENSE, PAINT, "proxy"} <= set(marks)
    assert set(result["steps"]) == {"0", "1"}
    assert result["images"] == 6
    assert result["code"] == stamp().code
    assert result["hardware"]["torch"] == torch.__version__


def test_seconds_are_of_the_process_and_leave_out_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 103.0, 103.0, 110.0, 115.0, 115.0])
    monkeypatch.setattr("flowgrpo.bench.claims.metering.time.process_time", lambda: next(now))
    monkeypatch.setattr("flowgrpo.bench.claims.metering.flow_task", lambda trainer: trainer.task)
    counts = SimpleNamespace(counts=lambda: SimpleNamespace(trained_edges=2))
    recipe = SimpleNamespace(rollout=SimpleNamespace(prompts=3))
    weights = SimpleNamespace(modules={})
    task = SimpleNamespace(device=torch.device("cpu"), recipe=recipe, plan_for=lambda number: counts, weights=weights)
    meter = Meter(tmp_path / "compute.jsonl", "a run", silent)
    meter.started(SimpleNamespace(task=task, next_iteration=0))  # type: ignore[arg-type]  # the clock shows 100
    meter.iteration({"iteration": 0})  # 103
    meter.evaluation(1, {"eval/gold": 0.5})  # 110
    meter.iteration({"iteration": 1})  # 115
    lines = json_lines(tmp_path / "compute.jsonl")
    assert [line["seconds"] for line in lines] == [3.0, 5.0]
    assert [line["trained_edges"] for line in lines] == [6, 6]


def test_counts_after_a_line_that_was_cut_short_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowgrpo.bench.claims.metering.flow_task", lambda trainer: trainer.task)
    counts = SimpleNamespace(counts=lambda: SimpleNamespace(trained_edges=2))
    recipe, weights = SimpleNamespace(rollout=SimpleNamespace(prompts=3)), SimpleNamespace(modules={})
    task = SimpleNamespace(device=torch.device("cpu"), recipe=recipe, plan_for=lambda number: counts, weights=weights)
    file = tmp_path / "compute.jsonl"
    meter = Meter(file, "a run", silent)
    meter.started(SimpleNamespace(task=task, next_iteration=0))  # type: ignore[arg-type]
    meter.iteration({"iteration": 0})
    file.write_text(file.read_text() + '{"iteration": 1, "forw')
    for number in (1, 2):
        meter.iteration({"iteration": number})
    assert [line["iteration"] for line in json_lines(file)] == [0, 1, 2]


def test_a_result_that_is_there_is_not_made_again(measured: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("flowgrpo.bench.claims.trainings._train", refuse)
    measure_run(measured, FLOW, 0, silent)
    (file,) = measured.results.glob("*.json")
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(AssertionError, match="trained again"):
        measure_run(measured, FLOW, 0, silent)
    file.write_bytes(kept)


def test_an_interrupted_run_ends_in_the_result_of_an_unbroken_one(measured: Settings, tmp_path: Path) -> None:
    settings = dataclasses.replace(measured, results=tmp_path)

    def stop(text: str) -> None:
        if "after 2 iterations" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_run(settings, FLOW, 0, stop)
    assert find_run(settings, FLOW, 0) is None
    said: list[str] = []
    measure_run(settings, FLOW, 0, said.append)
    assert any("goes on before iteration 2" in text for text in said)
    broken, whole = find_run(settings, FLOW, 0), find_run(measured, FLOW, 0)
    assert broken is not None
    assert whole is not None
    assert timeless(broken) == timeless(whole)


def test_a_run_whose_gradient_is_not_finite_has_that_as_its_result(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise FloatingPointError("the gradient is not finite")

    monkeypatch.setattr("flowgrpo.bench.claims.trainings._train", broken)
    settings = Settings(tmp_path, (3,), 0.5, tiny)
    measure_run(settings, FLOW, 3, silent)
    found = gather(settings)
    assert found.evidence.failed == {"flow_grpo": [3]}
    assert found.evidence.runs == {}
    write_report(found, tmp_path / "out")
    assert "flow_grpo (seed 3)" in (tmp_path / "out" / "claims.md").read_text()


def test_the_key_is_of_all_that_shapes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(Path("nowhere"))

    def key(job: Job = FLOW, seed: int = 0, **changed: Any) -> str:
        return key_of([recipe_of(job, seed, dataclasses.replace(settings, **changed))])

    first = key()
    other = [
        key(seed=1),
        key(scale=2.0),
        key(overrides=("optimizer.learning_rate=1e-4",)),
        key(Job("m", FORMS["mixgrpo"])),
    ]
    assert len({first, *other}) == 5
    assert key(overrides=("paper=another", "name=another")) == first
    assert key(results=Path("elsewhere"), any_code=True, seeds=(5,)) == first
    assert key_of([recipe_of(FLOW, 0, settings)], "more") != first
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
    found = find_run(measured, FLOW, 0)
    assert found is not None
    # As an older schema wrote it, without a key of the present schema.
    stored = yaml.safe_load(found["recipes"][0])
    del stored["rollout"]["decode_batch"]
    found["recipes"] = [yaml.safe_dump(stored)]
    (tmp_path / found["file"]).write_text(json.dumps(found))
    exact = find_run(settings, FLOW, 0)
    assert exact is not None
    assert "other_code" not in exact
    monkeypatch.setattr(claims_results, "stamp", lambda: dataclasses.replace(stamp(), code="later"))
    assert find_run(settings, FLOW, 0) is None
    assert gather(settings).unused == [found["file"]]
    lenient = dataclasses.replace(settings, any_code=True)
    # decode_batch is 6 in the run and 32 by default, so the old recipe is another one.
    assert find_run(lenient, FLOW, 0) is None
    like_it = dataclasses.replace(lenient, overrides=(*settings.overrides, "rollout.decode_batch=32"))
    taken = find_run(like_it, FLOW, 0)
    assert taken is not None
    assert taken["other_code"]
    assert find_run(dataclasses.replace(like_it, any_code=False), FLOW, 0) is None
    assert find_run(dataclasses.replace(like_it, scale=1.0), FLOW, 0) is None
    written = write_report(gather(like_it), tmp_path / "out").read_text()
    assert "These results come from other code, with an equal recipe: flow_grpo." in written


def test_a_broken_result_file_is_named(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    recipe = recipe_of(FLOW, 0, settings)
    (tmp_path / f"x-{key_of([recipe])}.json").write_text("{")
    with pytest.raises(ValueError, match="remove the file and run the command again"):
        find(settings, "x", [recipe])


def test_two_processes_do_not_do_the_same(tmp_path: Path, measured: Settings) -> None:
    with claimed(tmp_path / "new" / "lock") as first, claimed(tmp_path / "new" / "lock") as second:
        assert (first, second) == (True, False)
    with claimed(tmp_path / "new" / "lock") as again:
        assert again
    settings, said = dataclasses.replace(measured, results=tmp_path), []
    name = f"flow_grpo-seed0-{key_of([recipe_of(FLOW, 0, settings)])}"
    with claimed(tmp_path / "runs" / f"{name}.lock"):
        measure_run(settings, FLOW, 0, said.append)
    assert said == ["flow_grpo, seed 0: another process is making this run"]


def test_every_run_has_common_settings_and_is_evaluated_on_test_prompts() -> None:
    settings = Settings(Path("nowhere"))
    for job in jobs().values():
        recipe = recipe_of(job, 1, settings)
        assert recipe.run.iterations == ITERATIONS * job.length
        assert (recipe.data.heldout, recipe.data.train) == (HELD_OUT, "scenes:train") == ("scenes:test", "scenes:train")
        assert [r.label or r.name for r in recipe.evaluate.rewards or ()] == [PAINT, "gold", DENSE, "proxy"]
        assert (recipe.run.seed, recipe.evaluate.seeds, recipe.evaluate.prompts) == (1, 1, EVALUATED)
        assert trained_on(recipe) == "paint" or "+" in job.label


def test_every_recipe_is_read_back_from_its_result() -> None:
    """Also an interval with infinite bounds, for which JSON has no number."""
    settings = Settings(Path("nowhere"))
    for job in jobs().values():
        recipe = recipe_of(job, 0, settings)
        assert claims_results._contents([dump_recipe(recipe)]) == [claims_results.content(recipe)], job.label


def test_what_a_recipe_is_trained_on() -> None:
    assert trained_on(load_recipe("mixgrpo_flash_guard")) == "gold_dense"
    judged = "rewards=[{name: win_rate, options: {judge: proxy}}, {name: jpeg_compressibility}]"
    assert trained_on(load_recipe("mixgrpo_flash_guard", [judged])) == "win_rate by proxy, jpeg_compressibility"


# -- diversity and log-ratios ------------------------------------------------------------------------------------------


def test_diversity_of_images_made_by_hand() -> None:
    # Prompt 4: black, white and grey of 0.2; prompt 7: two equal ones; prompt 9: one alone.
    levels = torch.tensor([0.0, 0.4, 1.0, 0.01, 0.2, 0.4])
    images = levels[:, None, None, None].expand(6, 3, 4, 4)
    # Distances 1, 0.2 and 0.8 have the mean 2/3; the second prompt has 0.
    assert apart(images, [4, 7, 4, 9, 4, 7]) == pytest.approx((2 / 3 + 0) / 2)
    assert apart(images[:1], [4]) is None


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


# -- timing and probes -------------------------------------------------------------------------------------------------


class FakeTrainer:
    """Records the number of each iteration that it is asked for, in order."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name, self.asked, self.clock = name, asked, self
        self.task = SimpleNamespace(device=torch.device("cpu"))

    def lap(self) -> None:
        """Nothing to wait for."""

    def iterate(self, number: int) -> None:
        """One iteration."""
        self.asked.append((self.name, number))


def test_timed_iterations_take_turns_and_pass_through_the_run() -> None:
    asked: list[tuple[str, int]] = []
    trainers: dict[str, Any] = {name: FakeTrainer(name, asked) for name in ("one", "two")}
    figures = interleaved(trainers, 2)
    assert figures["iterations"] == [30, 90, 150, 210, 270] * 2
    assert asked[:4] == [("one", 30), ("two", 30), ("two", 90), ("one", 90)]
    assert [number for name, number in asked if name == "two"] == figures["iterations"]
    assert all(len(seconds) == 10 for seconds in figures["seconds"].values())


def test_a_share_of_time_is_of_whole_passes_so_a_place_is_no_error() -> None:
    timing = {"passes": 2, "seconds": {"one": [1.0, 3.0, 1.0, 5.0], "two": [4.0, 4.0, 6.0, 4.0]}}
    assert shares_of_time(timing, "one", "two") == [0.5, 0.6]
    assert shares_of_time({"seconds": timing["seconds"]}, "one", "two") == [pytest.approx(10 / 18)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings and probes with little work."""
    monkeypatch.setattr(claims_timings, "TURNS", 2)
    for name in ("EXPLORED", "SPREAD", "VANISHED"):
        monkeypatch.setattr(claims_probes, name, 1)
    monkeypatch.setattr(claims_probes, "DRAWN", 3)
    monkeypatch.setattr(claims_probes, "ETAS", {"flow_sde": (0.1, 0.7), "sage": (0.7,)})


@pytest.mark.usefixtures("quick")
def test_what_claims_need_is_measured_once(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path / "results", (0,), 0.01, tiny)
    said: list[str] = []
    claims(settings, ["sage", "vgpo", "loop", "guard-gradient"], tmp_path / "out", said.append)
    probes = gather(settings).evidence.probes
    explored = probes["exploration"]["kernels"]
    assert [entry["eta"] for entry in explored["flow_sde"]] == [0.1, 0.7]
    quiet, loud = explored["flow_sde"]
    assert all(a < b for a, b in zip(quiet["diversity"], loud["diversity"], strict=True))
    squared = probes["gradient_variance"]["squared"]
    # The group's mean shrinks the leave-one-out gradient by (G - 1)/G, here 2/3, and its variance by the square.
    assert sum(squared["mean"]) == pytest.approx(sum(squared["loo"]) * 4 / 9, rel=1e-3)
    assert sum(squared["loo"]) < sum(squared["none"])
    assert len(probes["gradient_spread"]["by_step"]["plain"]) == 1
    value, relative = (probes["vanishing"][name][0] for name in ("value", "relative"))
    assert relative[-1] == 0.0
    assert value[-1] > 0.0
    assert relative[0] > relative[-2] > 0.0

    def refuse(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("flowgrpo.bench.claims.probes.loaded", refuse)
    claims(settings, ["sage", "vgpo", "loop", "guard-gradient"], tmp_path / "out", said.append)
    assert "every run that claims need has a result" in said


@pytest.mark.usefixtures("quick")
def test_a_claim_of_time_and_reward_has_its_timing_and_its_runs(
    tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_gather, "MOST_SEEDS", 2)
    settings = Settings(tmp_path / "results", (0,), 0.01, tiny)
    said: list[str] = []
    claims(settings, ["mixgrpo", "guard-ratio"], tmp_path / "out", said.append)
    found = gather(settings)
    made = {label: set(runs) for label, runs in found.evidence.runs.items()}
    assert set(made) == {"dance_grpo", "mixgrpo", *GUARDED}
    # One seed decides nothing, so there is a second seed, and then no further seed is allowed.
    assert [made[label] for label in GUARDED] == [{0, 1}] * 2
    times = found.evidence.times["mixgrpo"]
    assert set(times["seconds"]) == {name + end for name in FAMILIES["mixgrpo"] for end in ("", APART)}
    assert times["iterations"] == [75, 225]
    assert not found.unused
    # With no time left, nothing is begun.
    late = dataclasses.replace(settings, seeds=(0, 1, 5), budget=0.0)
    claims(late, ["guard-ratio"], tmp_path / "out", said.append)
    assert said[-2].startswith("the budget of 0 h is spent; runs that are missing, first to last: flow_grpo+proxy (se")


@pytest.mark.parametrize("words", [("evaluate.prompts=1",), ("data.heldout=one.txt",)])
def test_a_short_run_with_one_held_out_prompt_is_refused_before_any_training(
    words: tuple[str, ...], tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a star\n")
    settings = Settings(tmp_path / "results", (0,), 0.01, (*tiny, *words))
    with pytest.raises(
        ValueError, match=r"^flow_grpo: .* needs 2 held-out prompts, and it would have 1, .*prompts=2 or more"
    ):
        claims(settings, ["guard-ratio", "flow_grpo"], tmp_path / "out", silent)
    assert not settings.results.exists()
    # The runs of claims compare seeds, not prompts, and a report measures nothing.
    late = dataclasses.replace(settings, budget=0.0)
    claims(late, ["guard-ratio"], tmp_path / "out", silent)
    claims(settings, ["flow_grpo"], tmp_path / "out", silent, only_report=True)


def test_timed_forms_have_the_papers_length_and_share_nothing_where_they_may() -> None:
    recipes = timed(Settings(Path("nowhere")), "mixgrpo")
    assert {recipe.run.iterations for recipe in recipes.values()} == {300}
    for name, recipe in recipes.items():
        assert recipe.sampler.plan["shared_noise"] is not name.endswith(APART)
    trees = timed(Settings(Path("nowhere")), "branchgrpo")
    assert "branchgrpo_depth" in trees
    assert "branchgrpo_depth" + APART not in trees


def test_timed_forms_run_as_in_the_papers_codes_too() -> None:
    recipes = timed(Settings(Path("nowhere")), "mixgrpo" + AGAIN)
    assert list(recipes) == list(FAMILIES["mixgrpo"])
    assert all(recipe.model.gradient_checkpointing for recipe in recipes.values())
    assert not any(recipe.sampler.plan["shared_noise"] for recipe in recipes.values())
    assert not any(recipe.model.gradient_checkpointing for recipe in timed(Settings(Path()), "mixgrpo").values())


def test_differences_within_groups_shrink_and_means_stay() -> None:
    values = torch.tensor([[1.0], [10.0], [3.0], [math.nan], [20.0]])
    found = toward_means(values, [0, 1, 0, 0, 1], 0.1)
    assert found[[0, 1, 2, 4], 0].tolist() == pytest.approx([1.9, 14.5, 2.1, 15.5])
    assert math.isnan(found[3, 0])


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
    for name in recipe_names("images"):
        recipe = rise_recipe(settings, name)
        if trained(recipe) in NO_RISE:
            continue
        [reward, *recorded] = recipe.rewards
        assert [entry.name for entry in recorded] == (["paint"] if name == "gardo" else [])
        assert all(entry.weight == 0 for entry in recorded)
        assert (reward.name, reward.weight) == ("jpeg_compressibility", 500.0) or name == "pref_grpo"
    assert rise_recipe(settings, "pref_grpo").rewards[0].options == {"judge": "jpeg_compressibility"}


def test_a_result_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_result(tmp_path / "new" / "x.json", {"value": math.nan})
    assert list((tmp_path / "new").iterdir()) == []
