"""Reward `relative`: an image in a liked and in a disliked style, scores and gradients (SRPO)."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowgrpo.rewards import InvalidScores, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.base import NoGradient
from flowgrpo.rewards.relative import Relative

INNER = '''
CALLS = []


def words(images, prompts, **columns):
    """Brightness, times the number of letters of the first word."""
    CALLS.append((list(prompts), sorted(columns)))
    letters = images.new_tensor([float(len(prompt.split(". ")[0])) for prompt in prompts])
    return letters * images.square().flatten(1).mean(1)


def listed(images, prompts):
    return [float(len(prompt)) for prompt in prompts]


def blind(images):
    return images.flatten(1).mean(1)


def some(images, prompts):
    values = images.flatten(1).mean(1)
    return values.masked_fill(values > 0.5, float("nan"))


def lengths(completions, prompts):
    return [float(len(text) * len(prompt)) for text, prompt in zip(completions, prompts)]


def wide(images, prompts):
    return [1.0]
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "inner.py").write_text(INNER)
    return tmp_path / "inner.py"


def made(file: Path, inner: str = "words", **options: object) -> RewardSet:
    given = {"liked": ["Good"], "disliked": ["Ba"], "favour": 0.5, "favour_inverted": 2.0, **options}
    return RewardSet([RewardSpec("relative", options={"reward": f"{file}:{inner}"} | given)])


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def test_the_liked_style_counts_a_little_more(file: Path) -> None:
    x = images()
    scored = made(file).score(x, ["a", "b", "c"])
    square = x.square().flatten(1).mean(1)
    assert torch.allclose(scored.values[:, 0], (1.5 * 4 - 2) * square)
    assert torch.allclose(torch.tensor(scored.sub_scores["relative"]["liked"]), 4 * square)
    assert torch.allclose(torch.tensor(scored.sub_scores["relative"]["disliked"]), 2 * square)


def test_the_gradient_is_that_of_the_formula(file: Path) -> None:
    x = images()
    values, slopes = made(file).gradients(x, ["a", "b", "c"])
    leaf = x.clone().requires_grad_()
    by_hand = (1.5 * 4 - 2) * leaf.square().flatten(1).mean(1)
    (wanted,) = torch.autograd.grad(by_hand.sum(), leaf)
    assert torch.allclose(values, by_hand.detach())
    assert torch.allclose(slopes, wanted)


def test_an_image_on_its_way_to_noise_counts_the_disliked_style_more(file: Path) -> None:
    x, columns = images(), {"inverted": [True, False, True], "noisiness": [0.0, 0.5, 1.0]}
    rewards = made(file, favour=[0.1, 0.3], favour_inverted=[0.4, 0.2])
    square = x.square().flatten(1).mean(1)
    factors = torch.tensor([4 - 1.4 * 2, 1.2 * 4 - 2, 4 - 1.2 * 2])
    values, slopes = rewards.gradients(x, ["a", "b", "c"], columns)
    assert torch.allclose(values, factors * square)
    assert torch.allclose(slopes, factors.view(3, 1, 1, 1) * 2 * x / x[0].numel())
    # Without a noise level, the mean of the two counts.
    assert torch.allclose(rewards.score(x, ["a", "b", "c"]).values[:, 0], (1.2 * 4 - 2) * square)


def test_a_prompt_keeps_its_words_and_all_words_come(file: Path) -> None:
    reward = Relative(f"{file}:words", liked=["A", "B", "C"], disliked=["D", "E"])
    prompts = [f"prompt {k}" for k in range(100)]
    chosen = [reward.words_of(prompt) for prompt in prompts]
    assert chosen == [reward.words_of(prompt) for prompt in prompts]
    assert len(set(chosen)) == 6
    seen = reward.reward.function.__globals__["CALLS"]
    reward(images=images(2), prompts=["x", "x"], taste=[1, 2])
    (liked, columns), (disliked, _) = seen[-2:]
    assert columns == ["taste"]
    word, other = reward.words_of("x")
    assert (liked, disliked) == ([f"{word}. x"] * 2, [f"{other}. x"] * 2)


def test_where_the_reward_does_not_apply_there_is_no_score(file: Path) -> None:
    x = torch.stack([torch.full((3, 4, 4), 0.2), torch.full((3, 4, 4), 0.8)])
    rewards = made(file, "some")
    assert rewards.score(x, ["a", "b"]).values.isnan().flatten().tolist() == [False, True]
    values, slopes = rewards.gradients(x, ["a", "b"])
    assert values[1] == 0.0
    assert bool((slopes[1] == 0.0).all())
    assert bool((slopes[0] != 0.0).all())


def test_completions_are_scored_too(file: Path) -> None:
    scored = made(file, "lengths").score(["1234"], ["ab"])
    assert scored.values[0, 0] == 1.5 * 4 * len("Good. ab") - 4 * len("Ba. ab")


def test_a_reward_without_a_gradient_is_named(file: Path) -> None:
    with pytest.raises(NoGradient, match="reward 'listed' has no gradient with respect to the images: it returns a"):
        made(file, "listed").gradients(images(), ["a", "b", "c"])


def test_a_reward_that_fails_is_named(file: Path) -> None:
    with pytest.raises(RewardError, match="as the reward") as caught:
        made(file, "wide").score(images(), ["a", "b", "c"])
    assert isinstance(caught.value.__cause__, InvalidScores)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"liked": "Good"}, "relative: liked is 'Good'; give a list of words, such as [Detailed]"),
        ({"liked": []}, "relative: liked is []; give a list of words"),
        ({"disliked": [" "]}, "relative: disliked has ' '; give words that are not empty"),
        ({"disliked": ["Bad", "Good"]}, "relative: 'Good' is in liked and in disliked, so nothing would be compared"),
        ({"favour": -1}, "relative: favour is -1; give a number of at least 0, or two such numbers in a list"),
        ({"favour": [0.1, 0.2, 0.3]}, "favour is [0.1, 0.2, 0.3]; give a number of at least 0, or two such numbers"),
        ({"favour_inverted": "much"}, "relative: favour_inverted is 'much'; give a number of at least 0"),
        ({"reward": "hpsv22"}, "relative: the reward 'hpsv22' for `reward` cannot be made: "),
        ({"reward": "proxy", "reward_options": {"devise": 1}}, "did you mean 'device'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], said: str, file: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        made(file, **options)


def test_a_reward_that_reads_no_prompts_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="does not read `prompts`, so it cannot tell styles apart; choose a reward"):
        made(file, "blind")
