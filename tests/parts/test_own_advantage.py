"""A combination, an advantage, a credit and a selection from a file of a user's."""

from pathlib import Path

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.session import start
from tests.parts.own_parts import IMAGES, TEXT, same_when_resumed, write_part

WORDS = {"mixgrpo": [*IMAGES, "sampler.plan.window.size=2"], "text": TEXT}

CODE = '''
import torch

from flowgrpo.parts.ranges import NotNegative, Share


def product(rewards, *, floor: NotNegative = 0.0):
    """The product of an ensemble."""
    return rewards.clamp(min=floor).prod(1)


def ranks(rewards, groups, *, low=-1.0, high=1.0):
    """The place of a sample in its group."""
    mine = (groups[:, None] == groups) * (rewards[:, None] > rewards)
    return low + (high - low) * mine.sum(1) / (groups[:, None] == groups).sum(1)


def early(judged, *, share: Share = 0.5):
    """The advantage of the sample, times a share that grows with the depth of a node."""
    found = judged.of_samples()
    depth = judged.experience.rollout.depth if judged.task == "images" else torch.ones(len(found))
    return found * (1 - share) ** depth


def first(rewards, groups, *, keep=2):
    """The first samples of every group."""
    return torch.stack([(groups[:k] == group).sum() < keep for k, group in enumerate(groups)])
'''

REMEMBERS = '''
from collections.abc import Sequence

from flowgrpo.parts.ranges import Given, Share


class Running:
    """A running mean of each prompt's rewards as its baseline."""

    def __init__(self, *, keep: Share = 0.9):
        self.keep, self.means = keep, {}

    def __call__(self, rewards, groups, *, prompts: Given[Sequence[int]]):
        before = rewards.new_tensor([self.means.get(prompt, 0.0) for prompt in prompts])
        for prompt, reward in zip(prompts, rewards.tolist()):
            self.means[prompt] = self.keep * self.means.get(prompt, reward) + (1 - self.keep) * reward
        return rewards - before

    def record(self):
        return {"running": sum(self.means.values()) / len(self.means)}

    def state_dict(self):
        return {"means": dict(self.means)}

    def load_state_dict(self, state):
        self.means = dict(state["means"])
'''


@pytest.mark.slow
@pytest.mark.parametrize("source", ["mixgrpo", "text"])
def test_a_run_with_parts_of_ones_own_resumes_to_the_last_bit(source: str, tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    words = [
        *WORDS[source],
        f"combine={{name: '{mine}:product', floor: 0.1}}",
        f"advantage={{name: '{mine}:ranks', low: -0.5}}",
        f"credit={{name: '{mine}:early', share: 0.25}}",
        f"select=[{{name: '{mine}:first', keep: 3}}]",
    ]
    again = same_when_resumed(source, words, tmp_path)
    assert (again.combine["floor"], again.credit["share"]) == (0.1, 0.25)
    assert again.advantage is not None
    assert (again.advantage.short, again.advantage["low"], again.advantage["high"]) == ("ranks", -0.5, 1.0)
    assert (again.select[0]["keep"], again.select[0]["among"]) == (3, "group")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["mixgrpo", "text"])
def test_an_advantage_of_ones_own_remembers_what_a_checkpoint_holds(source: str, tmp_path: Path):
    mine = write_part(tmp_path, REMEMBERS)
    words = [*WORDS[source], f"advantage={{name: '{mine}:Running', keep: 0.5}}"]
    same_when_resumed(source, words, tmp_path)
    assert list((tmp_path / "run" / "checkpoints").glob("*/advantage.pt"))


WRONG = """
from flowgrpo.parts.ranges import Given


def short(rewards, groups):
    return rewards[:-1]


def greedy(rewards, groups, *, pixels: Given[int]):
    return rewards


def flat(judged):
    return judged.advantages[:1]


def odd(judged, *, none=False):
    return judged.of_samples() * float("nan" if none else "inf")


def some(rewards, groups):
    return rewards


def two(rewards):
    return rewards * 1


def listed(rewards, groups):
    return [True] * len(rewards)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("advantage={}:short", r"an advantage has to be a tensor of shape \(8,\), one number a sample; it gave \(7,\)"),
        ("advantage={}:greedy", "an advantage asks for 'pixels', which a run does not give; it gives lengths, prompts"),
        ("credit={}:flat", r"credit flat has to give an advantage for each of \d+ nodes; it gave a tensor of shape"),
        ("credit={}:odd", r"credit odd gave -?inf for \d+ of \d+ samples or steps that have rewards; return"),
        (
            "credit={{name: '{}:odd', none: true}}",
            r"credit odd gave nan for (\d+) of \1 samples or steps that have rewards; return",
        ),
        ("select=[{}:some]", "a selection has to give a bool for each sample"),
        ("select=[{}:listed]", "a selection has to give a bool for each sample, .* it gave list"),
        (
            "combine={}:two",
            r"a combination has to give one number a sample, a tensor of shape \(8,\); it gave \(8, 1\)",
        ),
    ],
)
def test_what_gives_something_else_is_told_so(line: str, said: str, tmp_path: Path):
    mine = write_part(tmp_path, WRONG)
    trainer = start(load_recipe("mixgrpo", [*WORDS["mixgrpo"], line.format(mine)]), tmp_path / "run").trainer(Silent())
    with pytest.raises(ValueError, match=said):
        trainer.iterate(0)
