"""An objective, a loss of the forward process and penalties from a file of a user's."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_image_recipe, load_recipe
from flowgrpo.core.penalties import PENALTIES, Edges
from flowgrpo.parts.traits import keeps_base
from flowgrpo.training.losses.objective import Penalties
from tests.parts.own_parts import IMAGES, same_when_resumed, write_part

OBJECTIVE = '''
import torch

from flowgrpo.training.losses.edges import EdgeObjective


class regress(EdgeObjective):
    """Predict the advantage of a step by its log-ratio."""

    def __init__(self, setting, *, beta: float = 1.0):
        super().__init__(setting)
        self.beta = beta

    def loss(self, scored, advantage, mask, penalty, rows):
        error = (advantage[:, None] - self.beta * scored.log_ratio).square() / (2 * self.beta)
        if penalty is not None:
            error = error + penalty
        total = (error if mask is None else torch.where(mask, error, 0.0)).sum()
        return total / rows, {"loss": torch.stack([total.detach(), total.new_tensor(float(len(error)))])}
'''

LOSS = '''
import torch


def likelier(rows, *, strength: float = 1.0):
    """The error of good images falls, and that of bad ones rises."""
    error = rows.error(rows.velocity)
    return strength * rows.advantage.to(error) * error, torch.zeros_like(error).detach()
'''

PENALTY = '''
from flowgrpo.parts.traits import compares


@compares
def far(edges, *, power: float = 1.0):
    """Distance to the reference."""
    return edges.from_reference.flatten(1).abs().mean(1) ** power


def fast(edges):
    """Distance to where sampling was."""
    return edges.shift.square().flatten(1).mean(1)
'''


@pytest.mark.slow
def test_an_objective_of_ones_own_resumes_to_the_last_bit(tmp_path: Path) -> None:
    mine = write_part(tmp_path, OBJECTIVE)
    words = [*IMAGES, f"objective={{name: '{mine}:regress', beta: 2.0}}", "penalties.kl.weight=0.1"]
    again = same_when_resumed("mixgrpo", [*words, "sampler.plan.window.size=2"], tmp_path)
    assert again.task == "images"
    assert (again.objective.short, again.objective["beta"]) == ("regress", 2.0)


@pytest.mark.slow
def test_a_loss_of_the_forward_process_of_ones_own_resumes_to_the_last_bit(tmp_path: Path) -> None:
    mine = write_part(tmp_path, LOSS)
    words = [*IMAGES, f"objective.loss={{name: '{mine}:likelier', strength: 0.5}}", "objective.times=2"]
    again = same_when_resumed("diffusion_nft", words, tmp_path)
    assert again.task == "images"
    assert again.objective["loss"]["strength"] == 0.5
    assert [penalty.name for penalty in again.penalties] == ["kl"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mixgrpo", "awm"])
def test_a_penalty_of_ones_own_resumes_to_the_last_bit(recipe: str, tmp_path: Path) -> None:
    mine = write_part(tmp_path, PENALTY)
    added = f"penalties=[{{name: '{mine}:far', weight: 0.2, power: 2.0}}, {{name: '{mine}:fast', weight: 1.0}}]"
    more = ["sampler.plan.window.size=2"] if recipe == "mixgrpo" else []
    again = same_when_resumed(recipe, [*IMAGES, added, "penalties.far.weight=0.3", *more], tmp_path)
    assert again.task == "images"
    assert [(one.short, one["weight"]) for one in again.penalties] == [("far", 0.3), ("fast", 1.0)]


def test_a_penalty_says_whether_it_compares_with_the_base(tmp_path: Path) -> None:
    mine = write_part(tmp_path, PENALTY)
    assert keeps_base(load_image_recipe("mixgrpo", [f"penalties=[{{name: '{mine}:far', weight: 1.0}}]"]))
    assert not keeps_base(load_image_recipe("mixgrpo", [f"penalties=[{{name: '{mine}:fast', weight: 1.0}}]"]))
    moving = [f"penalties=[{{name: '{mine}:far', weight: 1.0}}]", "reference={decay: 0.5}"]
    assert not keeps_base(load_image_recipe("mixgrpo", moving))


def edges(count: int = 3) -> Edges:
    shift = torch.linspace(-1, 1, count * 4).reshape(count, 4)
    return Edges(0, 0.5, shift, shift.mean(1, keepdim=True), torch.ones(count), None, lambda: 2 * shift, lambda: shift)


def test_a_penalty_gives_a_value_for_each_edge(tmp_path: Path) -> None:
    mine = write_part(tmp_path, "def sum(edges):\n    return edges.shift.sum()\n")
    [chosen] = load_image_recipe("mixgrpo", [f"penalties=[{{name: '{mine}:sum', weight: 1.0}}]"]).penalties
    with pytest.raises(
        ValueError, match=r"penalty sum returns a tensor of shape \(\); return one value for each edge, "
    ):
        Penalties([chosen], 4).of(edges())


def test_the_order_of_penalties_changes_nothing() -> None:
    listed = [f"{{name: {name}, weight: {weight}}}" for name, weight in (("kl", 0.1), ("w2", 0.3), ("stepwise", 0.7))]
    totals = []
    for order in (listed, listed[::-1]):
        chosen = load_image_recipe("mixgrpo", [f"penalties=[{', '.join(order)}]"]).penalties
        made = Penalties(chosen, 4)
        totals.append(torch.stack(made.weighted(made.of(edges()))).sum(0))
    assert torch.equal(*totals)


def test_every_distance_of_the_package_is_nothing_at_rest() -> None:
    """Only `data` is no distance from another policy."""
    still = torch.zeros(2, 4)
    rest = Edges(
        1, 0.5, still, torch.zeros(2, 1), torch.ones(2), None, lambda: still, lambda: still, lambda: still,
        marks={"suspect": torch.ones(2)},
    )  # fmt: skip
    distances = {name: penalty for name, penalty in PENALTIES.items() if name != "data"}
    assert len(distances) == len(PENALTIES) - 1
    for name, penalty in distances.items():
        assert torch.equal(penalty(rest), torch.zeros(2)), name


def test_the_distance_of_images_is_that_of_their_predictions() -> None:
    shift = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
    images = Edges(0, None, shift, torch.zeros(2, 1), torch.ones(2), None, lambda: shift, lambda: shift)
    assert PENALTIES["kl"](images).tolist() == [5.0, 2.0]


@pytest.mark.parametrize(
    ("words", "penalties"),
    [
        (["penalties.kl.weight=0.01"], [("kl", 0.01)]),
        (["penalties.kl=null"], []),
        (["penalties.w2=null"], [("kl", 0.005)]),
        (["penalties.w2.weight=0.1"], [("kl", 0.005), ("w2", 0.1)]),
        (["penalties=[]", "penalties.stepwise={weight: 2.0}"], [("stepwise", 2.0)]),
        (["penalties.0.weight=0.2"], [("kl", 0.2)]),
    ],
)
def test_entries_of_a_list_are_addressed_by_their_name(words: list[str], penalties: list[tuple[str, float]]) -> None:
    found = load_image_recipe("mixgrpo_flash_guard", words).penalties
    assert [(penalty.name, penalty["weight"]) for penalty in found] == penalties


def test_rewards_are_addressed_by_their_label() -> None:
    assert load_recipe("mixgrpo_flash_guard", ["rewards.gold_dense.weight=2"]).rewards[0].weight == 2.0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("penalties.k=null", "there is no penalty 'k'; did you mean 'kl'"),
        ("penalties.l2.weight=1", r"penalties\.1: there is no penalty 'l2'"),
        ("penalties.kl=0.3", r"kl is a penalty with options; set one of these, as penalties\.kl\.OPTION=VALUE"),
        ("penalties.kl.weight=0", r"penalties\.0\.weight: .*greater than 0"),
        ("penalties.5.weight=1", "'5' is not an entry of a list of 1; count from 0, or name one of kl"),
        ("rewards.nope.weight=2", "'nope' is not an entry of a list of 1; count from 0, or name one of gold_dense"),
        ("objective.kl=0.1", "objective transition has no option 'kl'"),
        ("objective.loss=awm", "'loss' is an option of objective forward"),
        ("penalties.distil.weight=1", "learns a guided step, and sampler.guide is left out"),
    ],
)
def test_what_is_wrong_with_a_word_is_said(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("mixgrpo_flash_guard", [word])
