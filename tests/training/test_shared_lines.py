"""One advantage, one objective and one subset of a rollout, chosen by the same recipe lines for images and for text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.credit.combining import total_reward
from flowgrpo.training.credit.pooling import Batch
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer

ROLLOUT = ["rollout.prompts=2", "rollout.group=4", "rollout.batch=8", "data.heldout=null"]


@pytest.fixture(params=["images", "text"])
def lines(
    request: pytest.FixtureRequest, random_pipeline: Path, random_language_folder: Path, tmp_path: Path
) -> tuple[str, list[str]]:
    """A recipe, and what makes it small."""
    if request.param == "images":
        own = [f"model.path={random_pipeline}", "sampler.steps=4", "sampler.plan.window={name: all}",
               "rewards=[{name: jpeg_compressibility}]", "objective.surrogate=clip",
               "advantage={scale: group}", "clamp=5.0"]  # fmt: skip
        return "mixgrpo_flash_guard", [*ROLLOUT, *own]
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def weight(completions, **columns):\n    return [sum(map(ord, text)) / 500 for text in completions]\n"
    )
    own = [f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:weight'}}]", "generation.max_tokens=6",
           "objective.surrogate=clip", "optimizer={learning_rate: 2.0e-4, warmup: 0, ema: null}"]  # fmt: skip
    return "text", [*ROLLOUT, *own]


def trainer_of(lines: tuple[str, list[str]], folder: Path, *more: str) -> Trainer:
    return Session(load_recipe(lines[0], [*lines[1], *more]), RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.parametrize("surrogate", ["sapo", "nft", "dcpo", "opmd", "regression"])
def test_objectives(lines: tuple[str, list[str]], tmp_path: Path, surrogate: str) -> None:
    trainer = trainer_of(lines, tmp_path / "run", f"objective.surrogate={surrogate}", "optimizer.epochs=2")
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_what_a_bound_holds_back_is_counted_by_step_too(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    """BAPO's bounds, which are not called `low` and `high`, must be reported for each step as well."""
    bounds = "objective.surrogate={name: bapo, lower: 0.9999999, upper: 1.0000001}"
    trainer = trainer_of(lines, tmp_path / "run", bounds, "optimizer.epochs=2")
    record = trainer.iterate(0)
    assert record["clip_share"] > 0.1
    counts = [(step["count"], step["clip_share"]) for step in record["steps"].values()]
    by_step = sum(count * share for count, share in counts) / sum(count for count, _ in counts)
    assert record["clip_share"] == pytest.approx(by_step, abs=1e-6)


def test_advantages(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    found = {}
    for name, options in (
        ("group", ""), ("anchored", ", k: 0.5"), ("virtual_maximum", ", maximum: 9"), ("quantile", ", low: 0.3"),
    ):  # fmt: skip
        trainer = trainer_of(lines, tmp_path / name, f"advantage={{name: {name}{options}}}", "clamp=null")
        rows, e = trainer.collect(0)
        scores = trainer.score(trainer.rewards, rows, e)
        values = trainer.advantages(scores, e, rows)
        found[name] = values[e.rollout.leaf] if hasattr(e, "rollout") else values
    # The virtual sample is better than all others, so every sample is below the mean of five.
    assert (found["virtual_maximum"] < 0).all()
    assert float(found["group"].sum()) == pytest.approx(0, abs=1e-4)
    assert len({tuple(v.tolist()) for v in found.values()}) == 4


@pytest.mark.parametrize("choice", ["extremes", "best", "widest"])
def test_subsets_of_a_rollout(lines: tuple[str, list[str]], tmp_path: Path, choice: str) -> None:
    trainer = trainer_of(lines, tmp_path / "run", f"select=[{{name: {choice}, keep: 2}}]")
    rows, e = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, e)
    keep = trainer.credit.kept(Batch(trainer.collector.places, rows, e, scores))
    assert keep is not None
    mine = keep[e.rollout.leaf] if hasattr(e, "rollout") else keep
    assert mine.sum() == 4
    total = total_reward(scores, e)
    for group in (0, 1):
        values, chosen = total[e.groups == group], mine[e.groups == group]
        if choice == "widest":
            # Of all pairs, the one that is farthest apart.
            assert float(values[chosen].max() - values[chosen].min()) == float(values.max() - values.min())
        if choice == "best":
            assert float(values[chosen].sum()) == pytest.approx(float(values.topk(2).values.sum()))
    whole, part = (trainer.objective.rows(e, 0, k) for k in (None, keep))
    assert 0 < part < whole
    record = trainer.update(e, trainer.advantages(scores, e, rows), keep)
    assert record["ratio/first_error"] == 0.0


@pytest.mark.parametrize(
    "budget", ["{choice: until, rounds: 3, positives: 5, success: 0.0}", "{choice: variance, rounds: 2, most: 4}"]
)
def test_a_budget_in_rounds(lines: tuple[str, list[str]], tmp_path: Path, budget: str) -> None:
    trainer = trainer_of(lines, tmp_path / "run", f"rollout.budget={budget}", "optimizer.epochs=2")
    batch = trainer.collector.sample(0)
    rows, e, scores = batch.rows, batch.experience, batch.scores
    counts = torch.bincount(e.groups, minlength=2)
    # Nobody fails here (or succeeds, with rewards below 0), so groups are never complete.
    assert counts.tolist() == [12, 12] if "until" in budget else int(counts.sum()) == 16 and int(counts.min()) >= 4
    assert len(e.samples) == len(scores.values) == int(counts.sum())
    # The samples of later rounds are their own, not those of the first again.
    values = total_reward(scores, e)
    assert all(values[e.groups == p].unique().numel() > 4 for p in (0, 1) if counts[p] > 4)
    advantages = trainer.advantages(scores, e, rows)
    leaf = advantages[torch.cat([_leaves(part) + nodes.start for part, nodes in zip(e.rounds, e.nodes)])]
    for p in (0, 1):
        mine = values[e.groups == p]
        expected = (mine - mine.mean()) / (mine.std() + 1e-4)
        assert torch.allclose(leaf[e.groups == p].cpu(), expected.clamp(-5, 5), atol=1e-3)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0
    assert record["samples"] == int(counts.sum())


def _leaves(part: Any) -> torch.Tensor:
    return part.rollout.leaf if hasattr(part, "rollout") else torch.arange(len(part.samples))


def test_a_round_for_every_prompt_is_the_plain_rollout(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    plain = trainer_of(lines, tmp_path / "plain")
    rounds = trainer_of(lines, tmp_path / "rounds", "rollout.budget={rounds: 2, positives: 0, negatives: 0}")
    first, second = plain.iterate(0), rounds.iterate(0)
    assert second["rounds"] == 1
    same = ("reward/total", "grad_norm", "loss", "log_ratio_sq")
    assert {name: first[name] for name in same} == {name: second[name] for name in same}
    for one, other in zip(plain.task.weights.parameters(), rounds.task.weights.parameters()):
        assert torch.equal(one, other)


def test_a_prompt_in_several_templates(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    reward = tmp_path / "sees.py"
    reward.write_text(
        "SEEN = []\n"
        "def sees(prompts, **columns):\n    SEEN.extend(prompts)\n    return [k % 3 for k in range(len(prompts))]\n"
    )
    templates = "data.templates=['Think. {prompt}', '{prompt} In one word.']"
    trainer = trainer_of(lines, tmp_path / "run", templates, f"rewards=[{{name: '{reward}:sees'}}]")
    batch = trainer.collector.sample(0)
    rows, e = batch.rows, batch.experience
    assert torch.bincount(e.groups).tolist() == [8, 8]
    [part] = e.rounds
    if hasattr(part, "rollout"):
        assert list(part.prompts) == [
            t.format(prompt=r.text) for r in rows for t in ("Think. {prompt}", "{prompt} In one word.")
        ]
    else:
        assert len(set(map(tuple, part.prompts))) == 4
    # Rewards are asked about the prompt itself.
    assert set(trainer.rewards.rewards[0]._owner.__globals__["SEEN"]) == {row.text for row in rows}
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["samples"] == 16
    with pytest.raises(ValueError, match=r"must hold \{prompt\} once"):
        trainer_of(lines, tmp_path / "two", "data.templates=['Think.']")


@pytest.mark.parametrize("estimator", ["tracked", "cumulative"])
def test_advantages_that_remember(lines: tuple[str, list[str]], tmp_path: Path, estimator: str) -> None:
    # The rewards of the pipeline are negative sizes; SPO's rate needs 0 to 1.
    reward = tmp_path / "share.py"
    reward.write_text(
        "def share(prompts, groups, **columns):\n    return [(k * (1 + k) % 7) / 6 for k in range(len(prompts))]\n"
    )
    trainer = trainer_of(
        lines, tmp_path / "run", f"advantage={estimator}", f"rewards=[{{name: '{reward}:share'}}]",
        "clamp=null",
    )  # fmt: skip
    rows, e = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, e)
    first, second = (trainer.advantages(scores, e, rows) for _ in range(2))
    assert not torch.equal(first, second)
    trainer.keeper.write(1)
    [folder] = trainer.run.list_checkpoints()
    assert (folder / "advantage.pt").exists()


def test_prompts_by_the_variance_of_their_rewards(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    trainer = trainer_of(lines, tmp_path / "run", "extensions=[{name: curriculum, mix: 0.0}]")
    drawn = [row.id for row in trainer.collector.rows(0)]
    assert [row.id for row in trainer.collector.rows(0)] == drawn
    known = trainer.data.train.rows
    curriculum = trainer.extensions.each["curriculum"].curriculum  # type: ignore[attr-defined]
    for row in known:
        # Only the third prompt and the fifth have anything to teach.
        curriculum.observe(row.id, [0.0, 1.0] if row.id in (2, 4) else [1.0, 1.0])
    assert {row.id for k in range(5) for row in trainer.collector.rows(k)} == {2, 4}
    trainer.iterate(0)
    assert curriculum.state_dict()["sums"][2][0] > 2


def test_groups_without_a_difference_leave_the_count(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    reward = tmp_path / "half.py"
    reward.write_text(
        "def half(prompts, **columns):\n"
        "    first = prompts[0]\n"
        "    return [k % 2 if p == first else 0.5 for k, p in enumerate(prompts)]\n"
    )
    rows = {}
    for how, entries in (("keep", "[]"), ("skip", "[varied]")):
        trainer = trainer_of(lines, tmp_path / how, f"select={entries}", f"rewards=[{{name: '{reward}:half'}}]")
        prompts, e = trainer.collect(0)
        scores = trainer.score(trainer.rewards, prompts, e)
        keep = trainer.credit.kept(Batch(trainer.collector.places, prompts, e, scores))
        rows[how] = trainer.objective.rows(e, 0, keep)
        if how == "skip":
            assert keep is not None
            mine = keep[_leaves(e)]
            assert mine.tolist() == [True] * 4 + [False] * 4
        assert trainer.iterate(0)["grad_norm"] > 0
    assert 0 < rows["skip"] < rows["keep"]


def test_a_constraint_gets_a_weight(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    reward = tmp_path / "two.py"
    reward.write_text(
        "def aim(prompts, **columns):\n    return [k % 3 for k in range(len(prompts))]\n"
        "def kept(prompts, **columns):\n    return [k % 2 for k in range(len(prompts))]\n"
    )
    rewards = f"rewards=[{{name: '{reward}:aim'}}, {{name: '{reward}:kept', label: kept, at_least: 0.9}}]"
    trainer = trainer_of(lines, tmp_path / "run", rewards, "extensions=[{name: multipliers, rate: 0.5}]")
    record = trainer.iterate(0)
    # Half of the samples keep it, 0.9 are wanted: the multiplier is half of what is missing.
    assert record["multiplier/kept"] == pytest.approx(0.2)
    rows, e = trainer.collect(1)
    leaf = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)[_leaves(e)].cpu()
    aim, kept = (torch.tensor([k % n for k in range(4)], dtype=torch.float32) for n in (3, 2))
    shares = [(v - v.mean()) / (v.std() + 1e-4) for v in (aim, kept)]
    assert torch.allclose(leaf[:4], (shares[0] + 0.2 * shares[1]) / 1.2, atol=1e-5)
    trainer.keeper.write(1)
    assert (trainer.run.list_checkpoints()[-1] / "extensions" / "multipliers.pt").exists()


def test_options_of_another_advantage_are_refused(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"advantage group has no option 'k'.*'k' is an option of advantage anchored"):
        trainer_of(lines, tmp_path / "one", "advantage.k=1")
    with pytest.raises(ValueError, match="advantage beta has no option 'eps'; it has none"):
        trainer_of(lines, tmp_path / "two", "advantage={name: beta, eps: 0.0}")
    assert torch.is_grad_enabled()


def test_a_reward_ranks_the_successes_alone(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    """DRPO: of four samples two are right; of these the shorter one is better, and the longer one is not bad."""
    reward = tmp_path / "apart.py"
    reward.write_text(
        "def right(prompts, **columns):\n    return [[1, 1, 0, 0][k % 4] for k in range(len(prompts))]\n"
        "def brief(prompts, **columns):\n    return [[3, 1, 9, 0][k % 4] for k in range(len(prompts))]\n"
    )
    gate = "gate: {reward: right, at_least: 1.0, apart: true}"
    rewards = f"rewards=[{{name: '{reward}:right', label: right}}, {{name: '{reward}:brief', weight: 2.0, {gate}}}]"
    trainer = trainer_of(lines, tmp_path / "run", rewards, "advantage.eps=0.0", "advantage.scale=group")
    rows, e = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, e)
    leaf = trainer.advantages(scores, e, rows)[_leaves(e)].cpu()
    # Rewards 1, 1, 0, 0 have standard deviation 1/sqrt(3), so G is +-sqrt(3)/2; X is +-1/sqrt(2), counted twice.
    # sqrt(3)/2 - sqrt(2) would be negative, so the second success has 0.
    group, beside = 0.75**0.5, 2.0 / 2**0.5
    expected = [group + beside, 0.0, -group, -group]
    assert leaf.tolist() == pytest.approx(expected * 2, abs=1e-6)
    # What is saved is what the reward said, for failures too.
    assert scores.values[:, 1].tolist() == [3, 1, 9, 0] * 2
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_samples_are_compared_within_their_strata(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    reward = tmp_path / "kinds.py"
    reward.write_text(
        "def value(prompts, **columns):\n    return [[0, 1, 2, 5][k % 4] for k in range(len(prompts))]\n"
        "def kind(prompts, **columns):\n    return [k % 4 // 2 for k in range(len(prompts))]\n"
    )
    rewards = f"rewards=[{{name: '{reward}:value'}}, {{name: '{reward}:kind', label: kind, weight: 0.0}}]"
    trainer = trainer_of(
        lines, tmp_path / "run", rewards,
        "advantage={name: stratified, stratum: {reward: kind}, alpha: 1.0, eps: 0.0}",
    )  # fmt: skip
    rows, e = trainer.collect(0)
    leaf = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)[_leaves(e)].cpu()
    # Each pair by itself, whatever their difference.
    assert leaf.tolist() == pytest.approx([-(2**-0.5), 2**-0.5] * 4)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_likelihoods_that_fell_are_pushed_up(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    """LLDS is 0 before the weights move, and afterwards the mean fall of the rows that became less likely."""
    ratio = ["objective.ratio=gaussian", "objective.weight=none"] if lines[0] == "mixgrpo_flash_guard" else []
    found = {}
    for rows in ("all", "good"):
        trainer = trainer_of(
            lines, tmp_path / rows, *ratio, "optimizer.epochs=2", "optimizer.learning_rate=0.01",
            *_llds(lines, rows),
        )  # fmt: skip
        record = trainer.iterate(0)
        assert record["ratio/first_error"] == 0.0
        assert record["penalty"] == pytest.approx(0.5 * record["llds"])
        found[rows] = record["llds"]
    assert 0 < found["good"] < found["all"]


def _llds(lines: tuple[str, list[str]], rows: str) -> list[str]:
    return [f"penalties=[{{name: llds, weight: 0.5, rows: {rows}}}]"]


def test_bounds_are_searched_at_each_step(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    path = "lower: [0.5, 0.9], upper: [1.5, 3.0], lower_step: 0.2, upper_step: 0.75"
    found = {}
    for target in (0.001, 0.999):
        trainer = trainer_of(
            lines, tmp_path / str(target), "objective.surrogate=bapo", "optimizer.epochs=2",
            f"objective.balance={{target: {target}, {path}}}", "optimizer.learning_rate=0.01",
        )  # fmt: skip
        record = trainer.iterate(0)
        assert record["ratio/first_error"] == 0.0
        assert record["grad_norm"] > 0
        found[target] = record["bound/lower"], record["bound/upper"]
    # Good samples have a part of the gradient if some are below the upper bound; nearly all of it they never have.
    assert found[0.001] == pytest.approx((0.5, 1.5))
    assert found[0.999] == pytest.approx((0.9, 3.0))


def test_the_price_of_variance_follows_its_target(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    variance = "objective.variance={target: 0.5, value: 2.0, rate: 3.0}"
    trainer = trainer_of(
        lines, tmp_path / "run", "objective.surrogate=r2vpo", "optimizer.epochs=2", variance,
        "optimizer.learning_rate=0.01",
    )  # fmt: skip
    first = trainer.iterate(0)
    assert first["ratio/first_error"] == 0.0
    assert first["variance_price"] == 2.0
    assert first["ratio_variance"] > 0
    point = trainer.task.controls.variance  # type: ignore[attr-defined]
    assert point.value == pytest.approx(2.0 + 3.0 * (first["ratio_variance"] - 0.5))
    trainer.objective.prepare(trainer.collect(1)[1])
    assert trainer.objective.surrogate.keywords == {"lam": point.value}  # type: ignore[attr-defined]
    trainer.keeper.write(1)
    [folder] = trainer.run.list_checkpoints()
    assert torch.load(folder / "variance.pt", weights_only=True) == {"value": point.value}
    with pytest.raises(ValueError, match="of surrogate r2vpo, not of sapo"):
        load_recipe(lines[0], [*lines[1], variance, "objective.surrogate=sapo", "optimizer.epochs=2"])
    with pytest.raises(ValueError, match="which one optimizer step per rollout never leaves"):
        load_recipe(lines[0], [*lines[1], variance, "objective.surrogate=r2vpo"])


def test_a_weight_below_0_turns_the_update(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    """The change of the trained weights in one iteration, with weight 1 and -1 for the only reward."""
    moved = {}
    for weight in (1.0, -1.0):
        more = (f"rewards.0.weight={weight}", "optimizer.weight_decay=0.0", "extensions=[]")
        trainer = trainer_of(lines, tmp_path / str(weight), *more)
        before = [p.detach().clone() for p in trainer.task.weights.parameters()]
        trainer.iterate(0)
        after = trainer.task.weights.parameters()
        moved[weight] = torch.cat([(new.detach() - old).flatten() for new, old in zip(after, before)]).double()
    assert moved[1.0].norm() > 0
    assert float(torch.cosine_similarity(moved[1.0], moved[-1.0], dim=0)) < -0.9999
