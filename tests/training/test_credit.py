"""From rewards to advantages of steps, on real rollouts with a velocity of our own."""

import math
import re
from dataclasses import replace

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines.experience import Experience
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import Plan, branch_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.training.credit.from_scores import Credit
from flowgrpo.training.credit.pooling import Batch, pooled
from flowgrpo.training.credit.selecting import centred, kept_nodes
from flowgrpo.training.credit.step_credits import step_rewards
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.prompts.prompt_rows import PromptRow
from tests.training.judging import credited, selections

FIVE = shifted_sigmas(5, 3.0)
FLOW = Kernel("flow_sde", 0.7)
PLAIN = {"scale": "none"}


def experience(plan: Plan, prompts: int = 2) -> Experience:
    runner = RolloutRunner(lambda x, i, p: 0.5 * x, plan, (2, 3))
    rollout = runner.run(range(prompts))
    return Experience(rollout, plan, ("",) * prompts, torch.zeros(len(rollout.leaf), 3, 1, 1), 1, tuple(range(prompts)))


def scores(values: torch.Tensor) -> RewardBatch:
    return RewardBatch(values.reshape(len(values), -1), ("r",), torch.ones(1), {}, {}, {})


def credit(e: Experience, values: torch.Tensor, name: object = "leaf", advantage: object = None) -> torch.Tensor:
    return credited(e, scores(values), name, advantage)


def test_images_of_a_chain_give_their_advantage_to_each_of_its_steps() -> None:
    e = experience(window_plan(FIVE, [1, 2], FLOW, samples=3))
    values = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 5.0])
    found = credit(e, values, "leaf", PLAIN)
    for t in e.rollout.transitions:
        assert found[t.node].tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_completions_of_a_branch_are_compared_with_their_own_kind() -> None:
    """Two branches, finished in strides 1 and 2: the lower scores of coarse images must not count against a branch."""
    e = experience(spine_plan(FIVE, [0], FLOW, branches=2, completions=(1, 2)), prompts=1)
    fine = e.rollout.stride[e.rollout.leaf] == 1
    values = torch.where(fine, 10.0, 0.0) + torch.where(_branch(e) == _branch(e).min(), 1.0, 3.0)
    found = credit(e, values, "leaf", PLAIN)
    assert len(e.groups.unique()) == 2
    (t,) = e.rollout.transitions
    assert sorted(found[t.node].tolist()) == [-1.0, 1.0]


def _branch(e: Experience) -> torch.Tensor:
    """[L] node where each leaf's branch stands after its own step."""
    node = e.rollout.leaf
    while bool((e.rollout.depth[node] > 1).any()):
        node = torch.where(e.rollout.depth[node] > 1, e.rollout.parent[node], node)
    return node


def probed(values: dict[int, float], samples: int = 2) -> tuple[Experience, torch.Tensor]:
    """Chains of 5 steps, stochastic at 0 to 2, probed there; rewards of probes by branch, of images by sample."""
    e = experience(window_plan(FIVE, [0, 1, 2], FLOW, samples=samples, probe=1, shared_noise=False), prompts=1)
    return e, torch.tensor([values[int(b)] for b in e.rollout.branch[e.rollout.leaf]])


def test_a_state_has_the_reward_of_its_probe_or_of_what_it_becomes() -> None:
    e, values = probed({1: 1.0, 2: 2.0, 3: 3.0, 0: 9.0})
    nodes, rewards = step_rewards(e.rollout, values)
    assert rewards.tolist() == [[1.0, 2.0, 3.0, 9.0, 9.0, 9.0]] * 2
    assert (e.rollout.depth[nodes] == torch.arange(6)).all()
    assert torch.equal(nodes[:, -1], e.rollout.leaf[e.outcomes])


def test_a_shared_prefix_has_the_reward_of_the_state_it_leads_to() -> None:
    plan = window_plan(FIVE, [1, 2], FLOW, samples=3, probe=1)
    e = experience(plan, prompts=1)
    branch = e.rollout.branch[e.rollout.leaf]
    values = torch.where(branch == 2, 4.0, torch.where(branch == 3, 5.0, 6.0))
    assert step_rewards(e.rollout, values)[1].tolist() == [[4.0, 4.0, 5.0, 6.0, 6.0, 6.0]] * 3


def test_gains_are_compared_within_a_step_and_a_prompt() -> None:
    e = experience(window_plan(FIVE, [0, 1, 2], FLOW, samples=2, probe=1, shared_noise=False), prompts=1)
    values = torch.zeros(len(e.rollout.leaf))
    # The second chain's state after step 1 is better by 2 and stays so; nothing else differs.
    second = e.rollout.root[e.rollout.leaf] == 1
    values[second & (e.rollout.branch[e.rollout.leaf] != 1) & (e.rollout.branch[e.rollout.leaf] != 2)] = 2.0
    found = credit(e, values, {"name": "turning", "scale": "none"})
    by_step = [found[t.node].tolist() for t in e.rollout.transitions]
    # R of the second chain: 0, 0, 2, 2. d = 0, 2, 0, against 0; nothing turned against the trend before.
    assert by_step == [[0.0, 0.0], [-1.0, 1.0], [0.0, 0.0]]


def test_values_without_diversity_learn_from_their_level() -> None:
    """Two prompts, each with equal rewards, one above the other: plain groups give no signal, anchored groups do."""
    e = experience(window_plan(FIVE, [0, 1], FLOW, samples=2, probe=0, shared_noise=False))
    values = e.rollout.leaf_prompt.float()
    assert credit(e, values, "leaf", "group").nan_to_num().abs().max() == 0
    found = credit(e, values, {"name": "value", "ddof": 0, "eps": 0.0})
    for t in e.rollout.transitions:
        torch.testing.assert_close(found[t.node], torch.tensor([-1.0, -1.0, 1.0, 1.0]))


def test_previews_do_not_count_as_outcomes() -> None:
    e, _ = probed({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0})
    assert int(e.outcomes.sum()) == 2
    assert experience(spine_plan(FIVE, [0, 1], FLOW, branches=2)).outcomes.all()
    assert experience(window_plan(FIVE, [0], FLOW, samples=2)).outcomes.all()


def test_path_fusion_prefers_likelier_branches() -> None:
    e = experience(branch_plan(FIVE, [0, 1, 2], FLOW), prompts=1)
    values = torch.arange(8.0).square()
    mean = credit(e, values, {"name": "depth", "eps": 0.0})
    path = credit(e, values, {"name": "depth", "fusion": "path", "eps": 0.0, "beta": 5.0})
    flat = credit(e, values, {"name": "depth", "fusion": "path", "eps": 0.0, "beta": 0.0})
    torch.testing.assert_close(flat, mean)
    assert not torch.allclose(path, mean)
    # Below the last split there is one leaf to each node, whose weight is its own.
    leaves = e.rollout.leaf
    torch.testing.assert_close(path[leaves], mean[leaves])


def test_selection_leaves_out_images_and_what_leads_to_them_alone() -> None:
    e = experience(window_plan(FIVE, [1, 2], FLOW, samples=4))
    values = torch.tensor([0.0, 1.0, 2.0, 3.0] * 2)
    keep = kept_nodes(e, scores(values), selections({"name": "extremes", "keep": 2}))
    assert keep is not None
    assert keep[e.rollout.leaf].tolist() == [True, False, False, True] * 2
    for t in e.rollout.transitions:
        assert keep[t.node].tolist() == [True, False, False, True] * 2
    assert keep[e.rollout.parent == -1].all()
    everything = Credit(load_recipe("mixgrpo_flash_guard"))
    assert everything.kept(Batch([0, 1], [], e, scores(values))) is None


def test_previews_are_neither_chosen_nor_in_the_way_of_a_choice() -> None:
    e = experience(window_plan(FIVE, [0, 1, 2], FLOW, samples=4, probe=1, shared_noise=False))
    image = e.outcomes
    values = torch.where(image, 0.0, 100.0)
    values[image] = torch.tensor([0.0, 1.0, 2.0, 3.0] * 2)
    keep = kept_nodes(e, scores(values), selections({"name": "extremes", "keep": 2}))
    assert keep is not None
    for t in e.rollout.transitions:
        assert keep[t.node].tolist() == [True, False, False, True] * 2


def test_a_first_stochastic_step_may_turn_also_after_a_deterministic_prefix() -> None:
    """R at the states of the window: 0, 1, then 1 for the image; D = 1, and its first step begins that way."""
    e = experience(window_plan(FIVE, [2, 3], FLOW, samples=2, probe=1, shared_noise=False), prompts=1)
    branch, second = e.rollout.branch[e.rollout.leaf], e.rollout.root[e.rollout.leaf] == 1
    values = (second & (branch != 3)).float()
    found = credit(e, values, {"name": "turning", "scale": "none"})
    assert [found[t.node].tolist() for t in e.rollout.transitions] == [[-1.0, 1.0], [0.0, 0.0]]


def test_width_pruning_keeps_the_better_of_each_last_split_and_the_trunk() -> None:
    e = experience(branch_plan(FIVE, [0, 2], FLOW), prompts=1)
    values = torch.tensor([0.0, 1.0, 9.0, 3.0])
    keep = kept_nodes(e, scores(values), selections({"name": "best", "keep": 1, "among": "split"}))
    assert keep is not None
    assert keep[e.rollout.leaf].tolist() == [False, True, True, False]
    assert keep[e.rollout.depth <= 2].all()
    assert [int(keep[t.node].sum()) for t in e.rollout.transitions] == [2, 2, 2, 2]


def test_steps_above_images_of_which_none_is_chosen_are_not_trained() -> None:
    """Two trees of four images: in the first all rewards are equal, in the second the left half has both extremes."""
    e = experience(branch_plan(FIVE, [0, 2], FLOW))
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 9.0, 3.0, 4.0])
    keep = kept_nodes(e, scores(values), selections({"name": "varied"}))
    assert keep.tolist() == [prompt == 1 for prompt in e.rollout.prompt.tolist()]
    keep = kept_nodes(e, scores(values), selections({"name": "varied"}, {"name": "extremes", "keep": 2}))
    assert keep[e.rollout.leaf].tolist() == [False] * 4 + [True, True, False, False]
    for t in e.rollout.transitions:
        left = [1, 1] if len(t.node) == 8 else [1]
        assert keep[t.node].int().tolist() == [0] * (len(t.node) // 2) + left + [0] * len(left)


def test_unknown_options_of_a_credit_are_named() -> None:
    with pytest.raises(ValueError, match=r"credit.beta: credit leaf has no option 'beta'; it has none.*credit depth"):
        load_recipe("mixgrpo_flash_guard", ["credit.beta=1"])
    with pytest.raises(ValueError, match=r"credit value has no option 'main'; its options are gamma, k, eps, ddof"):
        load_recipe("vgpo", ["credit.main=step"])


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("turning", "main: both", "credit.main: Input should be 'step', 'total', 'rest' or 'gain'"),
        ("value", "gamma: 2.0", "credit.gamma: Input should be less than or equal to 1"),
        ("value", "k: 0.0", "credit.k: Input should be greater than 0"),
        (
            "depth",
            "beta: 2.0",
            "credit depth: beta is 2.0, and only fusion path weights a leaf by the likelihood of its path",
        ),
    ],
)
def test_values_an_option_cannot_take_are_named_before_any_rollout(name: str, option: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        load_recipe("branchgrpo", [f"credit={{name: {name}, {option}}}"])


def test_several_rewards_are_added_up_for_credits_of_steps() -> None:
    e, values = probed({1: 1.0, 2: 2.0, 3: 3.0, 0: 9.0})
    both = RewardBatch(torch.stack([values, values], 1), ("a", "b"), torch.tensor([0.25, 0.75]), {}, {}, {})
    chosen = {"name": "turning", "scale": "none"}
    one = credit(e, values, chosen)
    torch.testing.assert_close(credited(e, both, chosen), one)
    missing = replace(both, values=both.values.index_fill(0, torch.tensor([0]), torch.nan))
    assert credited(e, missing, chosen).isfinite().all()


def test_the_kept_advantages_of_a_group_sum_to_zero() -> None:
    """Of (-3, -1, 0, 4) the two ends are kept, whose mean is 1/2. The second group keeps one, the third none."""
    advantages = torch.tensor([-3.0, -1.0, 0.0, 4.0, 2.0, 1.0, 5.0, torch.nan])
    chosen = torch.tensor([True, False, False, True, True, False, False, True])
    found = centred(advantages, chosen, torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    assert found[:7].tolist() == [-3.5, -1.5, -0.5, 3.5, 0.0, -1.0, 5.0]
    assert found[7].isnan()


def test_a_recipe_centres_what_it_selects() -> None:
    """Rewards 0, 1, 2 and 5 less their mean 2; without the 1, the advantages -2, 0 and 3 have the mean 1/3."""
    lines = ["advantage={name: group, scale: none}", "select=[{name: extremes, keep: 3, centre: true}]"]
    e = experience(window_plan(FIVE, [1], FLOW, samples=4), prompts=1)
    batch = Batch([0], [PromptRow(0, "a square")], e, scores(torch.tensor([0.0, 1.0, 2.0, 5.0])))
    everyone = pooled(Processes(), batch.places, batch.rows, e, batch.scores)
    part = Credit(load_recipe("mixgrpo", lines))
    (t,) = e.rollout.transitions
    found, kept = part.advantages(everyone, batch)[t.node], part.kept(batch)
    assert found.tolist() == pytest.approx([-7 / 3, -4 / 3, -1 / 3, 8 / 3])
    assert kept is not None
    assert float(found[kept[t.node]].sum()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("transform", "wanted"),
    [
        ("positive", [0.0, 0.0, 0.0, 3.0]),
        ("negative", [-2.0, -1.0, 0.0, 0.0]),
        ("one", [0.0, 0.0, 0.0, 1.0]),
        ("sign", [-1.0, -1.0, 0.0, 1.0]),
        ("exponential", [-5.0, -math.e, -1.0, -math.exp(-3.0)]),
    ],
)
def test_a_transform_comes_before_the_bound(transform: str, wanted: list[float]) -> None:
    """Rewards 0, 1, 2 and 5 less their mean 2. The bound 5 holds back -exp(2) alone."""
    lines = ["advantage={name: group, scale: none}", f"transform={transform}"]
    e = experience(window_plan(FIVE, [1], FLOW, samples=4), prompts=1)
    batch = Batch([0], [PromptRow(0, "a square")], e, scores(torch.tensor([0.0, 1.0, 2.0, 5.0])))
    everyone = pooled(Processes(), batch.places, batch.rows, e, batch.scores)
    (t,) = e.rollout.transitions
    found = Credit(load_recipe("mixgrpo", lines)).advantages(everyone, batch)
    assert found[t.node].tolist() == pytest.approx(wanted)


def test_a_sample_without_a_reward_has_no_advantage_after_a_transform() -> None:
    """-exp(-0) is -1, and such a sample has 0; so have previews, which are no samples."""
    lines = ["advantage={name: group, scale: none}", "transform=exponential"]
    e = experience(window_plan(FIVE, [1], FLOW, samples=2, probe=1), prompts=1)
    values = torch.where(e.outcomes, 0.0, 7.0)
    values[e.outcomes] = torch.tensor([torch.nan, 3.0])
    batch = Batch([0], [PromptRow(0, "a square")], e, scores(values))
    everyone = pooled(Processes(), batch.places, batch.rows, e, batch.scores)
    (t,) = e.rollout.transitions
    found = Credit(load_recipe("mixgrpo", lines)).advantages(everyone, batch)
    assert found[t.node].tolist() == [0.0, -1.0]
    assert found[e.rollout.leaf[~e.outcomes]].tolist() == [0.0]


@pytest.mark.parametrize(
    ("recipe", "lines", "said"),
    [
        ("draft", ["transform=positive"], "objective reward_gradient reads none; leave transform out"),
        ("direct_align", ["transform=one"], "objective direct_align reads none; leave transform out"),
        ("diffusion_opd", ["transform=sign"], "objective visited reads none; leave transform out"),
        ("text_opd", ["transform=sign"], "changes advantages, and objective"),
        ("ddrl", ["transform=exponential", "clamp=null"], "write a bound, such as clamp: 5.0"),
        ("ddrl", ["transform=exp"], "Input should be 'positive', 'negative', 'one', 'sign' or 'exponential'"),
    ],
)  # fmt: skip
def test_a_transform_that_does_not_fit_is_refused(recipe: str, lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        load_recipe(recipe, lines)


def test_centring_needs_the_advantages_of_samples() -> None:
    with pytest.raises(ValueError, match="use credit leaf and an advantage"):
        load_recipe("branchgrpo", ["select=[{name: extremes, keep: 4, centre: true}]"])
