"""Scouts: they are images of few steps, their scores choose seeds, and these seeds give the images that are trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.pipelines.experience import Scouted
from flowgrpo.training.images.scouting import seeds_to_sample
from flowgrpo.training.planning import levels_of, planner, scouting_plan
from flowgrpo.training.recipe_plans import check_plans
from flowgrpo.training.reporting.records import scouts_record
from flowgrpo.training.session import start
from flowgrpo.training.tasks import FlowTask
from flowgrpo.training.trainer import Trainer
from tests.training import test_sharding
from tests.training.test_processes import Runs, lines, printed, require_equal, run_all, shortened, statuses

SCOUTS = "rollout.scouts={group: 7, steps: 2}"


def test_seeds_of_the_best_and_the_worst_scouts_in_rising_order() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.0, 0.7], [3.0, 1.0, 2.0, 5.0, 4.0]])
    assert seeds_to_sample(scores, 2, "extremes").tolist() == [[1, 3], [1, 3]]
    assert seeds_to_sample(scores, 3, "extremes").tolist() == [[1, 3, 4], [1, 3, 4]]
    assert seeds_to_sample(scores, 3, "best").tolist() == [[1, 2, 4], [0, 3, 4]]
    # Of three values, the greatest variance is that of two at one end and one at the other.
    assert seeds_to_sample(torch.tensor([[0.0, 0.2, 0.9, 1.0]]), 3, "widest").tolist() == [[0, 2, 3]]


def test_scouts_without_a_score_fill_the_places_in_their_order() -> None:
    nan = torch.nan
    scores = torch.tensor([[nan, nan, nan, nan], [nan, 2.0, nan, 1.0]])
    assert seeds_to_sample(scores, 3, "extremes").tolist() == [[0, 1, 2], [0, 1, 3]]


def test_metrics_of_all_processes_do_not_depend_on_their_shares() -> None:
    prompts = [(0.1, 3.0, 1.0), (0.7, 3.0, -0.5), (0.0, 0.0, float("nan")), (0.3, 2.0, 0.1)]
    found = scouts_record([prompts])
    assert found == scouts_record([prompts[2:], prompts[:2], []])
    assert found == {"scouts/reward": pytest.approx(1.1 / 8), "scouts/rank": pytest.approx(0.2)}
    assert scouts_record([[prompts[2]]]) == {"scouts/reward": None, "scouts/rank": None}
    assert scouts_record([[], []]) == {}


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("default", ["rollout.scouts={group: 12, steps: 3}"], r"rollout.scouts.group is 12 and rollout.group is 12, so "
         "there is nothing to choose; use at least 13 scouts, or leave rollout.scouts out"),
        ("default", ["rollout.scouts={group: 24, steps: 5}"], "rollout.scouts.steps is 5, and an image has 5 steps, so "
         "a scout is no cheaper; use at most 4, or sample all images, and choose some of them with select"),
        ("mixgrpo", ["rollout.scouts={group: 24, steps: 3}"], "with sampler.plan window several images have one seed "
         "here; use sampler.plan ode, or plan window with shared_noise: false and without probe"),
        ("branchgrpo", ["rollout.scouts={group: 24, steps: 3}"], "with sampler.plan branch several images have one "),
        ("tempflow_grpo", ["rollout.scouts={group: 24, steps: 3}"], "with sampler.plan spine several images have one "),
        ("diffusion_dpo", ["rollout.scouts={group: 24, steps: 3}"], "sampler.plan given samples nothing; leave "),
        ("diffusion_opd", ["rollout.scouts={group: 24, steps: 3}"], "rollout.scouts chooses by rewards, and objective "
         "visited does not learn from rewards; leave rollout.scouts out"),
        ("default", ["rollout.scouts={group: 24, steps: 3}", "rollout.budget={choice: variance}"], "rollout.scouts "
         "chooses among all scouts of a prompt, and rollout.budget samples a prompt in several rounds; leave one of"),
        ("default", ["rollout.scouts={steps: 3}"], "rollout.scouts.group"),
        ("text", ["rollout.scouts={group: 24, steps: 3}"], "rollout.scouts"),
    ],
)  # fmt: skip
def test_scouts_that_cannot_work_are_refused(recipe: str, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, words)


def test_a_plan_of_ones_own_with_one_seed_is_refused(tmp_path: Path) -> None:
    """It says nothing about itself, so only its trees show that several images have one seed."""
    (tmp_path / "own.py").write_text(
        "from flowgrpo.samplers.plans import Plan, StepPlan\n\n"
        "def one_seed(setting, iteration):\n"
        "    first = StepPlan(kernel=setting.kernel, children=setting.group, trained=True)\n"
        "    return Plan(setting.sigmas, (first, *(StepPlan() for _ in setting.sigmas[2:])))\n"
    )
    own = f"sampler.plan={tmp_path / 'own.py'}:one_seed"
    check_plans(load_recipe("mixgrpo_guard", [own]))
    with pytest.raises(ValueError, match=r"chooses 12 seeds of a prompt, one for each image, and .* 12 images from 1 "):
        check_plans(load_recipe("mixgrpo_guard", [own, "rollout.scouts={group: 24, steps: 3}"]))


@pytest.mark.parametrize("words", [[], ["sampler.shift=3.0"], ["sampler.sigmas=[1.0, 0.9, 0.6, 0.3, 0.0]"]])
def test_scouts_take_deterministic_steps_over_the_levels_of_their_number(words: list[str]) -> None:
    own = (1.0, 0.8, 0.0)
    recipe = load_recipe("default", ["rollout.scouts={group: 24, steps: 2}", "sampler.plan.spread=0.5", *words])
    plan = planner(recipe, levels_of(recipe))(0)
    found = scouting_plan(recipe, plan, own)
    assert found.sigmas == ((1.0, 0.75, 0.0) if "shift" in str(words) else own)
    assert (found.roots, found.root_spread, found.counts().evaluations) == (24, 0.5, 48)
    assert found.first_stochastic is None
    assert {step.solver for step in found.steps} == {"dpmpp_2m"}


def ode_words(small: list[str], *more: str) -> list[str]:
    """Recipe `diffusion_nft` on the small model: three images of a prompt from seven scouts."""
    kept = [word for word in small if not word.startswith("sampler.plan")]
    return [*kept, "objective.times=2", *more]


def trainer_of(folder: Path, words: list[str], recipe: str = "diffusion_nft") -> Trainer:
    return start(load_recipe(recipe, words), folder).trainer(Silent())


def alone(trainer: Trainer) -> Trainer:
    """The trainer, which samples and decodes each state alone: so it is rounded in one way, whatever else there is."""
    assert isinstance(trainer.task, FlowTask)
    scouts = trainer.task.scouts
    for policy in (trainer.task.policy, *([] if scouts is None else [scouts.policies.of(None)])):
        policy.batch = policy.decode_batch = 1
    return trainer


def found_by(trainer: Trainer) -> Scouted:
    """What scouts found in the first iteration, and the images of the chosen seeds."""
    [scouted] = trainer.collect(0)[1].scouted
    assert isinstance(scouted, Scouted)
    return scouted


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_scouts_are_the_images_of_a_recipe_of_fewer_steps_and_their_seeds_give_those_of_all_steps(
    small: list[str], tmp_path: Path, solver: str
) -> None:
    """To the last bit, and so are their first noises."""
    words = ode_words(small, f"sampler.solver={solver}")
    words += ["rollout.batch=7", "objective.times=1"]
    trainer = alone(trainer_of(tmp_path / "scouts", [*words, SCOUTS]))
    cheap = alone(trainer_of(tmp_path / "cheap", [*words, "rollout.group=7", "sampler.steps=2"]))
    whole = alone(trainer_of(tmp_path / "whole", [*words, "rollout.group=7"]))
    batch, few, all_steps = (one.collector.sample(0) for one in (trainer, cheap, whole))
    [scouted] = batch.experience.scouted
    totals = few.scores.values @ few.scores.weights
    assert torch.equal(scouted.scores.flatten(), totals)
    assert torch.equal(scouted.numbers, seeds_to_sample(totals.view(2, 7), 3, "extremes"))
    places = (scouted.numbers + torch.tensor([[0], [7]])).flatten()
    assert torch.equal(batch.experience.samples, all_steps.experience.samples[places])
    assert torch.equal(batch.scores.values, all_steps.scores.values[places])
    assert batch.experience.rollout.root[batch.experience.rollout.leaf].tolist() == scouted.numbers.flatten().tolist()
    assert batch.experience.record() == {"evaluations": 2 * (7 * 2 + 3 * 4)}
    noises = [origin["noise"] for origin in batch.experience.origins()]
    assert noises == [all_steps.experience.origins()[place]["noise"] for place in places]


@pytest.mark.slow
def test_the_correlation_compares_each_scout_with_the_image_of_its_seed(small: list[str], tmp_path: Path) -> None:
    """By ranks that are counted one by one, from the scores of the saved samples."""
    trainer = trainer_of(tmp_path / "run", ode_words(small, "rollout.scouts={group: 7, steps: 2}", "rollout.group=6"))
    batch = trainer.collector.sample(0)
    [scouted] = batch.experience.scouted
    totals = (batch.scores.values @ batch.scores.weights).view(2, 6).double()
    before = scouted.scores.gather(1, scouted.numbers).double()
    found = []
    for pair in zip(before.tolist(), totals.tolist()):
        ranks = [[sum(o < v for o in own) + (own.count(v) - 1) / 2 for v in own] for own in pair]
        if all(len(set(own)) > 1 for own in ranks):
            found.append(float(np.corrcoef(ranks)[0, 1]))
    record = trainer.iterate(0)
    assert found
    assert record["scouts/rank"] == pytest.approx(float(np.mean(found)), abs=1e-6)
    assert record["scouts/reward"] == pytest.approx(float(scouted.scores.double().mean()), abs=1e-6)
    assert record["evaluations"] == 2 * (7 * 2 + 6 * 4)


@pytest.mark.slow
def test_a_window_that_is_stochastic_keeps_the_noise_of_its_seeds(small: list[str], tmp_path: Path) -> None:
    """Also the noise of later steps is addressed by the number of the seed."""
    words = [*small, "sampler.plan.shared_noise=false"]
    trainer = alone(trainer_of(tmp_path / "scouts", [*words, SCOUTS], "mixgrpo_guard"))
    whole = alone(trainer_of(tmp_path / "whole", [*words, "rollout.group=7"], "mixgrpo_guard"))
    (_, own), (_, every) = trainer.collect(0), whole.collect(0)
    [scouted] = own.scouted
    assert torch.equal(own.samples, every.samples[(scouted.numbers + torch.tensor([[0], [7]])).flatten()])
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


@pytest.mark.slow
def test_a_saved_picture_is_made_again_by_its_noise(small: list[str], tmp_path: Path) -> None:
    words = ode_words(small, SCOUTS, "sampler.solver=euler", "data.heldout=null", "run.iterations=1")
    alone(trainer_of(tmp_path / "run", words)).train()
    records = lines(tmp_path / "run", "samples/index.jsonl")
    assert len({record["noise"] for record in records}) == 6
    for record in records[1::3]:
        [path] = sample_images(
            str(tmp_path / "run"), [record["prompt"]], tmp_path / "again", noise=record["noise"], base=True
        )
        made, shown = (np.asarray(Image.open(one)) for one in (path, tmp_path / "run" / "samples" / record["image"]))
        assert np.array_equal(made, shown)


@pytest.mark.slow
def test_scouts_of_prompts_of_several_sizes_have_these_sizes(small: list[str], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def level(images, prompts, height, width, **columns):\n"
        "    assert all(images.shape[-2:] == (h or 64, w or 64) for h, w in zip(height, width))\n"
        "    return images.mean(dim=(1, 2, 3)).tolist()\n"
        "level.remote = True\n"
    )
    sizes: list[Any] = [(32, 64), None, (64, 32)]
    with (tmp_path / "p.jsonl").open("w") as file:
        for k, size in enumerate(sizes):
            own = {} if size is None else {"height": size[0], "width": size[1]}
            file.write(json.dumps({"prompt": f"a red star and {k} circles", **own}) + "\n")
    words = ode_words(
        small, SCOUTS, "rollout.prompts=3", "rollout.chunk=1", f"data.train={tmp_path / 'p.jsonl'}",
        f"rewards=[{{name: '{tmp_path / 'reward.py'}:level'}}]", "data.heldout=null", "run={iterations: 1}",
    )  # fmt: skip
    trainer = trainer_of(tmp_path / "run", words)
    trainer.train()
    shapes = {np.asarray(Image.open(path)).shape[:2] for path in (tmp_path / "run" / "samples").glob("iter-*/*.png")}
    assert shapes == {(32, 64), (64, 64), (64, 32)}
    [record] = lines(tmp_path / "run", "metrics.jsonl")
    assert record["evaluations"] == 3 * (7 * 2 + 3 * 4)
    assert -1.0 <= record["scouts/rank"] <= 1.0


REWARDS = """
import os
import signal

calls = []

def level(images, **columns):
    calls.append(len(images))
    if len(calls) == int(os.environ.get("KILLED_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return images.mean(dim=(1, 2, 3)).tolist()

def far(images, prompts, groups, **columns):
    return images.flatten(1).std(dim=1).tolist()

far.remote = True
"""


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`one` in one process at once, `two` in two chunk by chunk; `killed` in one, as it scores scouts, and resumed."""
    folder = tmp_path_factory.mktemp("scouts")
    (folder / "rewards.py").write_text(REWARDS)
    rewards = f"[{{name: '{folder / 'rewards.py'}:level'}}, {{name: '{folder / 'rewards.py'}:far', weight: 0.5}}]"
    words = ode_words(
        small, f"rewards={rewards}", f"evaluate={{every: 2, prompts: 3, seeds: 3, rewards: {rewards}}}",
        "optimizer={eps: 0.01, learning_rate: 0.5, weight_decay: 0.0, ema: {decay: 0.5, every: 1}}",
        "run={iterations: 2, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}",
    )  # fmt: skip
    found, jobs = Runs(logs=folder), list[dict[str, Any]]()
    # Batches of three states hold the same states in any process, because there are three images and six scouts.
    sizes = "prompts: 3, group: 3, batch: 3, decode_batch: 3, scouts: {group: 6, steps: 2}"
    for kind, more in (("", []), ("full-", ["model.train=full"])):
        for name, rollout in (("one", sizes), ("two", f"{sizes}, chunk: 1")):
            recipe = load_recipe("diffusion_nft", [*words, f"rollout={{{rollout}}}", *more])
            (folder / f"{kind}{name}.yaml").write_text(dump_recipe(recipe))

    def job(name: str, words: list[str], count: int, **environment: str) -> None:
        jobs.append({"words": words, "log": name, "count": count, "environment": environment})

    def train(name: str, source: str, count: int, **environment: str) -> Path:
        job(name, ["train", str(folder / f"{source}.yaml"), "--out", str(folder / name)], count, **environment)
        return folder / name

    found.one["plain"], found.two["plain"] = train("plain-one", "one", 1), train("plain-two", "two", 2)
    found.one["shards"] = train("shards-one", "full-one", 1)
    found.two["shards"] = train("shards-two", "full-two", 2, **test_sharding.FSDP)
    # The evaluation, scouts and images of the first iteration, scouts of the second.
    found.one["killed"] = train("killed", "one", 1, KILLED_AT="4")
    run_all(jobs, folder)
    jobs.clear()
    found.one["alone"] = shortened(found.two["plain"], folder / "alone", 1)
    found.one["copy"] = Path(shutil.copytree(found.one["killed"], folder / "copy"))
    job("alone", ["resume", str(found.one["alone"])], 1)
    job("killed-resumed", ["resume", str(found.one["killed"])], 1)
    run_all(jobs, folder)
    return found


@pytest.mark.slow
def test_two_processes_give_the_run_of_one(runs: Runs) -> None:
    assert statuses(runs, "plain-one") == [0], printed(runs, "plain-one", 0)
    assert statuses(runs, "plain-two") == [0, 0], printed(runs, "plain-two", 0) + printed(runs, "plain-two", 1)
    require_equal(runs.two["plain"], runs.one["plain"])
    first, other = (lines(run, "metrics.jsonl")[0] for run in (runs.one["plain"], runs.two["plain"]))
    # Before the first update there is nothing that was added in another order.
    assert [first[f"scouts/{name}"] for name in ("rank", "reward")] == [
        other[f"scouts/{name}"] for name in ("rank", "reward")
    ]
    assert first["evaluations"] == other["evaluations"] == 3 * (6 * 2 + 3 * 4)


@pytest.mark.slow
def test_processes_that_share_weights_send_unequal_numbers_of_scouts(runs: Runs) -> None:
    """While one sends its second prompt's scouts the other has none, and takes part in what gathers the weights."""
    assert statuses(runs, "shards-two") == [0, 0], printed(runs, "shards-two", 0) + printed(runs, "shards-two", 1)
    test_sharding.require_equal(runs.two["shards"], runs.one["shards"])


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one(runs: Runs) -> None:
    assert statuses(runs, "alone") == [0], printed(runs, "alone", 0)
    require_equal(runs.one["alone"], runs.one["plain"])


@pytest.mark.slow
def test_a_run_killed_while_scouts_are_scored_goes_on_to_the_last_bit(runs: Runs) -> None:
    assert statuses(runs, "killed") == [-9]
    assert len(lines(runs.one["copy"], "metrics.jsonl")) == 1
    assert statuses(runs, "killed-resumed") == [0], printed(runs, "killed-resumed", 0)
    assert contents(runs.one["killed"]) == contents(runs.one["plain"])


@pytest.mark.slow
def test_scouts_are_those_of_the_policy_that_samples(small: list[str], tmp_path: Path) -> None:
    """The policy that samples lags behind; weights that the lagging average does not have yet change no scout."""
    trainer = trainer_of(tmp_path / "run", ode_words(small, SCOUTS))
    assert trainer.lagging is not None
    before = found_by(trainer)
    with torch.no_grad():
        for parameter in trainer.task.weights.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = found_by(trainer)
    assert torch.equal(before.scores, after.scores)


@pytest.mark.slow
def test_a_run_says_how_many_scouts_it_sends(small: list[str], tmp_path: Path) -> None:
    found = start(load_recipe("diffusion_nft", ode_words(small, SCOUTS)), tmp_path / "run")
    told = list(found.task.describe())
    assert "scouts: 7 a prompt, of 2 steps each; the seeds of 3 of them, extremes, are sampled with all 4 steps" in told
