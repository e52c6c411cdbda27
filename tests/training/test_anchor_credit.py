"""GiGPO from a recipe's lines: steps of images and tokens are compared with those from the same state."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.samplers.plans import branch_plan, window_plan
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.trainer import Trainer
from tests.training.judging import credited
from tests.training.test_credit import FIVE, FLOW, experience, scores
from tests.training.test_text_processes import lines_of

HALF = 2**-0.5
BRANCH = "sampler={steps: 4, plan: {name: branch, splits: [0, 2]}}"
FOUR = "rollout.group=4"


def credit(e: object, values: list[float], **more: object) -> torch.Tensor:
    chosen = {"name": "anchor", "eps": 0.0, **more}
    return credited(e, scores(torch.tensor(values)), chosen, {"name": "group", "eps": 0.0})


def test_edges_of_a_tree() -> None:
    """Splits at steps 0 and 2 give four images; rewards 1, 0, 0, 0 and, of the second prompt, equal ones."""
    plan = branch_plan(FIVE, splits=[0, 2], kernel=FLOW, stochastic=[0, 1, 2], trained=[0, 1, 2])
    e = experience(plan)
    found = credit(e, [1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    rollout = e.rollout
    first = rollout.prompt == 0
    by_depth = {d: sorted(found[first & (rollout.depth == d)].tolist(), reverse=True) for d in range(1, 6)}
    # As in tests/core/test_anchors.py, with steps that do not split between: they have the mean of their images.
    assert by_depth[1] == pytest.approx([1.0, -1.0])
    assert by_depth[2] == pytest.approx([0.5, -0.5])
    assert by_depth[3] == pytest.approx([1.5 + HALF, -0.5, -0.5, -0.5 - HALF])
    assert by_depth[5] == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert found[rollout.prompt == 1].abs().max() == 0
    twice = credit(e, [1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5], omega=2.0)
    assert sorted(twice[first & (rollout.depth == 1)].tolist()) == pytest.approx([-1.5, 1.5])


def test_chains_from_one_noise_share_the_state_before_the_first_stochastic_step() -> None:
    plan = window_plan(FIVE, kernel=FLOW, window=[1, 2], samples=3, shared_noise=True)
    e = experience(plan, 1)
    found = credit(e, [0.0, 1.0, 2.0])
    trained = [found[e.rollout.depth == t + 1].tolist() for t in (1, 2)]
    assert trained == [pytest.approx([-2.0, 0.0, 2.0]), pytest.approx([-1.0, 0.0, 1.0])]


def test_tokens_after_a_prefix() -> None:
    ids = [[5, 6, 3], [5, 7, 3], [8, 3], [8, 3]]
    sampled = Sampled(ids, [[-1.0] * len(one) for one in ids], [True, True, True, False])
    batch = RewardBatch(torch.tensor([[1.0], [0.0], [0.0], [9.0]]), ("right",), torch.ones(1), {}, {}, {})
    e = Completions([[1]], sampled, [""] * 4, [0, 0, 0, 0], drop_truncated=True)
    found = credited(e, batch, {"name": "anchor", "scale": "none"}, {"scale": "none"})
    # The last was cut off: without it the mean is 1/3, after 5 it is 1/2, and after 8 one is alone.
    assert found.tolist() == [
        pytest.approx(row)
        for row in ([4 / 3, 2 / 3 + 1 / 2, 2 / 3], [-2 / 3, -1 / 3 - 1 / 2, -1 / 3], [-2 / 3, -1 / 3, 0], [0, 0, 0])
    ]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("omega=-1.0", "credit.omega: Input should be greater than or equal to 0"),
        ("gamma=0.0", "credit.gamma: Input should be greater than 0"),
        ("root=true", "credit anchor has no option 'root'; its options are omega, gamma, scale, eps, ddof"),
    ],
)
def test_options_it_cannot_take_are_named(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", ["credit=anchor", f"credit.{option}"])


@pytest.fixture
def of(request: pytest.FixtureRequest) -> AnyRecipe:
    base, more = request.param
    small = request.getfixturevalue({"mixgrpo_flash_guard": "small", "text": "small_text"}[base])
    kept = [line for line in small if not line.startswith("sampler.") or "branch" not in str(more)]
    return load_recipe(base, [*kept, "credit=anchor", "data.heldout=null", *more])


RUNS = [
    ("mixgrpo_flash_guard", (BRANCH, FOUR, "credit.scale=none")), ("mixgrpo_flash_guard", ("credit.scale=none",)),
    ("text", ("credit.omega=0.5", "rollout.group=8")),
]  # fmt: skip


def trainer(recipe: AnyRecipe, folder: Path) -> Trainer:
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.slow
@pytest.mark.parametrize("of", RUNS, indirect=True)
def test_runs_train_and_resume_to_the_last_bit(of: AnyRecipe, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer(of, whole).train()
    first = trainer(of, cut)
    for iteration in range(2):
        first.run.log(first.iterate(iteration))
        first.next_iteration = iteration + 1
    first.keeper.write(first.next_iteration)
    again = Session(of, RunFolder.open(cut)).trainer(Silent())
    again.resume()
    again.train()
    mine, theirs = (
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(folder / "metrics.jsonl")]
        for folder in (whole, cut)
    )
    assert mine == theirs
    assert all(line["ratio/first_error"] == 0 and line["grad_norm"] > 0 for line in mine)
    ours, expected = (load_file(next((folder / "lora").glob("*.safetensors"))) for folder in (whole, cut))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("of", RUNS, indirect=True)
def test_steps_of_one_sample_differ(of: AnyRecipe, tmp_path: Path) -> None:
    found = trainer(of, tmp_path / "run")
    rows, e = found.collect(0)
    advantages = found.advantages(found.score(found.rewards, rows, e), e, rows)
    if of.task == "text":
        assert any(len(row[: len(ids)].unique()) > 1 for row, ids in zip(advantages, e.sampled.ids))
        return
    trained = [t.node for t in e.rollout.transitions]
    first, last = advantages[trained[0]], advantages[trained[-1]]
    assert float(first.abs().sum() / len(first)) != pytest.approx(float(last.abs().sum() / len(last)))


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        (
            "mixgrpo_flash_guard",
            ["sampler.plan.shared_noise=false"],
            "one tree, which sampler.plan window does not make here; use sampler.plan branch",
        ),
        (
            "tempflow_grpo",
            [],
            "one tree, which sampler.plan spine does not make here; use sampler.plan branch",
        ),
        ("diffusion_nft", [], "needs trained transitions"),
        ("mixgrpo_flash_guard", ["advantage.scale=batch"], "use advantage group, with scale group or none"),
        ("text", ["advantage=beta"], "use advantage group, with scale group or none"),
        ("text", ["objective.conflict=2.0"], "with credit anchor a token has an advantage of its own"),
        ("text", ["objective=answers"], "use objective tokens, not answers"),
        ("text", ["rollout.budget={}"], "use credit leaf"),
        ("text", ["advantage=tracked"], "compares samples, not steps or tokens"),
    ],
)
def test_where_no_state_is_shared_it_is_refused(base: str, more: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, ["credit=anchor", *more])
