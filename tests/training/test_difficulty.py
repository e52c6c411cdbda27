"""Extensions that follow the difficulty of a prompt: a factor of advantages, and a term of exploration."""

from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.extensions import Difficulty, Exploration
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from tests.training.test_text import task_of
from tests.training.text_runs import trainer_of


@pytest.fixture
def graded(small_text: list[str], tmp_path: Path) -> list[str]:
    """Overrides as `small_text`, with a reward of 0 or 1 by the completion's characters."""
    reward = tmp_path / "odd.py"
    reward.write_text(
        "def odd(completions, **columns):\n    return [float(sum(map(ord, t)) % 3 == 0) for t in completions]\n"
    )
    return [*small_text, f"rewards=[{{name: '{reward}:odd'}}]"]


def advantages_of(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """[12] the advantages and the rewards of the first rollout."""
    batch, _, advantages = trainer._compared(trainer._sampled(0))
    return advantages.cpu(), batch.scores.values[:, 0].cpu()


def test_advantages_are_multiplied_by_the_factor_of_their_prompt(graded: list[str], tmp_path: Path) -> None:
    plain, rewards = advantages_of(trainer_of(graded, tmp_path / "plain"))
    ease = rewards.view(3, 4).mean(1)
    assert len(set(ease.tolist())) > 1
    linear = trainer_of(graded, tmp_path / "linear", "extensions=[{name: difficulty, strength: 0.5}]")
    found, _ = advantages_of(linear)
    torch.testing.assert_close(found.view(3, 4), plain.view(3, 4) * (1.5 - ease)[:, None])
    extension = linear.extensions.each["difficulty"]
    assert isinstance(extension, Difficulty)
    assert extension.record()["difficulty"] == pytest.approx(float((1.5 - ease).mean()))


def test_a_column_of_the_prompts_gives_the_ease(graded: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "sized.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{k}+1=", "size": {k / 4}}}\n' for k in range(5)))
    lines = [f"data.train={prompts}", "data.heldout=null"]
    plain, _ = advantages_of(trainer_of(graded, tmp_path / "plain", *lines))
    by_size = trainer_of(graded, tmp_path / "sized", *lines, "extensions=[{name: difficulty, column: size}]")
    found, _ = advantages_of(by_size)
    ease = torch.tensor([float(row.columns["size"]) for row in by_size.collector.rows(0)])
    torch.testing.assert_close(found.view(3, 4), plain.view(3, 4) * (2 - 2 * ease)[:, None])
    prompts.write_text('{"prompt": "1+1=", "size": 1.5}\n' * 3)
    wrong = trainer_of(graded, tmp_path / "wrong", *lines, "extensions=[{name: difficulty, column: size}]")
    with pytest.raises(
        ValueError, match=r"from column 'size', and .*sized.jsonl, line . has 1.5; write a number from 0"
    ):
        wrong.iterate(0)


def test_exploration_gains_on_hard_prompts_and_costs_on_easy_ones(graded: list[str], tmp_path: Path) -> None:
    more = "extensions=[{name: exploration, window: 2, threshold: 3.43, strength: 0.3, bound: 0.9}]"
    plain, rewards = advantages_of(trainer_of(graded, tmp_path / "plain"))
    trainer = trainer_of(graded, tmp_path / "run", more)
    found, _ = advantages_of(trainer)
    e = trainer.collect(0)[1]
    policy = task_of(trainer).policy
    shares = []
    for row in range(12):
        with torch.no_grad():
            entropy = policy.statistics(e, [row], entropy=True).entropy
        assert entropy is not None
        own = entropy[0].tolist()
        windows = [sum(own[t : t + 2]) / len(own[t : t + 2]) for t in range(len(own))]
        shares.append(sum(one > 3.43 for one in windows) / len(own))
    assert len(set(shares)) > 2
    for p in range(3):
        mine = slice(4 * p, 4 * p + 4)
        n, ease = torch.tensor(shares[mine]), float(rewards[mine].mean())
        limit = 0.9 * plain[mine].abs()
        want = plain[mine] + (0.3 * (1 - 2 * ease) * (n - n.mean())).clamp(-limit, limit)
        torch.testing.assert_close(found[mine].float(), want.float(), atol=1e-6, rtol=1e-5)
    assert not torch.equal(found, plain)
    assert isinstance(trainer.extensions.each["exploration"], Exploration)


@pytest.mark.parametrize(
    "lines",
    [
        ["extensions=[{name: difficulty, form: hard}]", "optimizer.epochs=2"],
        ["extensions=[{name: difficulty, form: even}]", "rollout.budget={choice: until, rounds: 2}"],
        ["extensions=[{name: exploration}]", "penalties=[{name: window_kl, weight: 0.1, threshold: 3.0}]"],
        ["objective.surrogate={name: capo, limit: 0.05}", "optimizer.epochs=2"],
    ],
    ids=["hard", "rounds", "exploration", "capo"],
)
def test_an_iteration_starts_at_a_ratio_of_1(graded: list[str], tmp_path: Path, lines: list[str]) -> None:
    record = trainer_of(graded, tmp_path / "run", *lines).iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_rejected_tokens_have_no_gradient_before_the_first_step(graded: list[str], tmp_path: Path) -> None:
    """CAPO measures the curvature of the current policy, so it acts at a ratio of 1."""
    shares = []
    for limit in (1e-9, 1.0):
        lines = [f"objective.surrogate={{name: capo, limit: {limit}}}", "rollout.tokens=40"]
        record = trainer_of(graded, tmp_path / f"run-{limit}", *lines).iterate(0)
        shares.append((record["clip_share"] > 0.3, record["clip_share_neg"], record["grad_norm"] > 0))
    assert shares == [(True, 1.0, False), (False, 0.0, True)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["extensions=[{name: difficulty, most: 0.5}]"], "most is 0.5; use a largest factor of at least 1"),
        (["extensions=[{name: difficulty, form: even, strength: 0.5}]"], "only form linear has a strength"),
        (["extensions=[difficulty, difficulty]"], "extensions has difficulty 2 times"),
        (["extensions=[exploration]", "credit=prefix", "advantage=null"], "use credit leaf"),
        (["extensions=[exploration]", "rollout.budget={choice: until, rounds: 2}"], "in several rounds"),
        (["objective={surrogate: capo, level: sequence}"], "rejects tokens, and objective.level is sequence"),
    ],
)
def test_what_does_not_go_together_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)


def test_the_surrogates_refuse_their_options_before_a_run(small_text: list[str]) -> None:
    with pytest.raises(ValueError, match=r"low \* \(1 \+ spread\) < 1"):
        check(load_recipe("text", [*small_text, "objective.surrogate={name: hapo, low: 0.6}"])).require()


def test_steps_of_images_have_the_factor_of_their_prompt(small: list[str], tmp_path: Path) -> None:
    """In a tree, a step has the mean over the images below it, which all are of one prompt."""
    lines = [line for line in small if not line.startswith(("sampler.", "rewards"))]
    lines += ["sampler={steps: 4, plan: {name: branch, splits: [0, 2]}}", "rollout.group=4", "data.heldout=null",
              "rewards=[{name: gold, options: {dense: true}}]"]  # fmt: skip

    def of(folder: Path, *more: str) -> Trainer:
        recipe = load_recipe("mixgrpo_flash_guard", [*lines, *more])
        return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())

    plain, rewards = advantages_of(of(tmp_path / "plain", "extensions=[]"))
    trainer = of(tmp_path / "run", "extensions=[{name: difficulty, strength: 0.5}]")
    batch, everyone, found = trainer._compared(trainer._sampled(0))
    factor = 1.5 - rewards.double().view(2, 4).mean(1).clamp(0, 1)
    nodes = batch.experience.node_advantages(factor.repeat_interleave(4))
    torch.testing.assert_close(found.cpu(), (plain * nodes.cpu()).to(found.dtype), rtol=1e-4, atol=1e-6)
    assert len(everyone.prompts) == 8
