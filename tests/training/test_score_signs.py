"""The meaning of weights, on every path from scores to advantages: signs, scales, and that weight 0 has no effect."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.credit.combining import combine
from flowgrpo.training.credit.selecting import kept_nodes
from tests.training.judging import selections
from tests.training.score_paths import PATHS, Path, advantages_of, batch_of, recipe_of, rollout_of, values_of

REFUSED = {
    "beta": "its rewards are verdicts of 0 and 1",
    "tracked": "its rewards are success rates, from 0 to 1",
    "gate/apart": "its rule, that no success is punished, has no mirror image; a weight below 0 is refused",
}
"""Takes no total below 0, by definition."""
UNEVEN = {
    "worst": "the least of an ensemble becomes the greatest",
    "agreement": "disagreement is punished whatever the sign",
    "quantile": "the worst samples count more than the best",
    "text/quantile": "the worst samples count more than the best",
    "virtual_maximum": "the virtual sample stays the best",
    "minimum": "the least reward of the steps to come becomes the greatest",
    "soft minimum": "the least reward of the steps to come becomes the greatest",
    "text/minimum": "the least score of the parts to come becomes the greatest",
    "text/unlikely": "a success is a reward above 0",
    "constraint": "it asks for at least so much, whatever its weight, which multipliers take the place of",
}
"""Is no odd function of the rewards, by definition."""
UNSCALED = {
    "virtual_maximum": "its maximum is a number of the recipe",
    "beta": "its rewards are verdicts of 0 and 1",
    "tracked": "its rewards are success rates, from 0 to 1",
    "agreement": "a variance is in squares of the unit",
    "soft minimum": "its temperature is in units of the reward",
    "gate/apart": "the weight of the reward apart is beside the whitened advantages of the others",
    "constraint": "the weight of a constraint is its multiplier",
}
"""Has a unit of its own, by definition."""
every = pytest.mark.parametrize("name", PATHS)


def found(path: Path, values: Tensor, weights: tuple[float, ...], sign: float = 1.0) -> Tensor:
    earlier = [sign * values_of(path, values.shape[1], seed=9)] * (path.visits - 1)
    return advantages_of(path, values, weights, *earlier)


def close(got: Tensor, want: Tensor) -> None:
    assert bool(want.isfinite().all())
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-3, atol=2e-4)


@every
@pytest.mark.parametrize("count", [1, 2])
def test_the_sign_of_rewards_and_weights(name: str, count: int) -> None:
    path = PATHS[name]
    count = 2 if path.second else count
    values, weights = values_of(path, count), path.weights[:count]
    less = tuple(-weight for weight in weights)
    plain = found(path, values, weights)
    assert plain.abs().max() > 0.1
    if name == "constraint":
        with_less = found(path, values * torch.tensor([-1.0, 1.0]), (-0.5, 0.25))
        close(with_less, plain)
        return
    if name == "text/unlikely":
        # With both signs turned, no sample is a success.
        close(found(path, values.abs() + 1, weights), -found(path, values.abs() + 1, less))
        return
    if name == "gate/apart":
        with pytest.raises(ValueError, match="change the sign"):
            found(path, values, less)
        return
    close(found(path, -values, less, -1.0), plain)
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"`rewards` holds a value"):
            found(path, values, less)
        return
    turned = found(path, values, less)
    close(found(path, -values, weights, -1.0), turned)
    assert (turned - plain).abs().max() > 0.1
    if name not in UNEVEN:
        close(turned, -plain)


@every
def test_the_scale_of_weights(name: str) -> None:
    """Where advantages are divided by a deviation twice the weight changes nothing, elsewhere it doubles them."""
    if name in UNSCALED:
        return
    path = PATHS[name]
    values = values_of(path, 2)
    once, twice = found(path, values, (0.5, 0.25)), found(path, values, (1.0, 0.5))
    recipe = recipe_of(path, (0.5, 0.25))
    whitens = (recipe.advantage or recipe.credit).get("scale") != "none" or "gdpo" in name
    close(twice, once if whitens else 2 * once)


@every
@pytest.mark.parametrize("junk", ["some", math.nan])
def test_a_weight_of_0_is_as_if_the_reward_were_not_there(name: str, junk: float | str) -> None:
    path = PATHS[name]
    values = values_of(path, 2)
    values[1, 0] = values[1, 1] = math.nan  # with `z` alone
    values[5, 0] = math.nan
    column = values_of(path, 1, seed=4) if junk == "some" else torch.full((len(values), 1), float(junk))
    three = torch.cat([values, column], 1)
    with_it, without = advantages_of(path, three, (*path.weights, 0.0)), advantages_of(path, values, path.weights)
    assert torch.equal(with_it, without)
    if not path.second:
        alone = torch.cat([values[:, :1], column], 1)
        single = advantages_of(path, values[:, :1], path.weights[:1])
        assert torch.equal(advantages_of(path, alone, (path.weights[0], 0.0)), single)
    chosen = selections({"name": "extremes", "keep": 2}, "varied")
    kept = []
    for given, weights in ((three, (*path.weights, 0.0)), (values, path.weights)):
        recipe, e = recipe_of(path, weights), rollout_of(path.kind)
        combined = combine(batch_of(path, given, weights), e, recipe.rewards, recipe.combine.make())
        kept.append(kept_nodes(e, combined, chosen))
    assert torch.equal(*kept)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["mixgrpo_flash_guard", "text"])
def test_a_recipe_that_optimises_nothing_is_refused(base: str) -> None:
    name = "gold" if base == "mixgrpo_flash_guard" else "answer"
    load, apart = partial(load_recipe, base), "gate: {reward: r, apart: true}"
    words = "every reward has weight 0 \\(r, s\\).*nothing is optimised; give one a weight above 0, or below 0"
    with pytest.raises(ValueError, match=words):
        load([f"rewards=[{{name: {name}, label: r, weight: 0}}, {{name: {name}, label: s, weight: 0.0}}]"])
    with pytest.raises(ValueError, match=r"reward s has weight 0.*and `at_least`.*leave one of them out"):
        load([f"rewards=[{{name: {name}, label: r}}, {{name: {name}, label: s, weight: 0, at_least: 0.5}}]"])
    constrained = f"rewards=[{{name: {name}, label: r, weight: 0}}, {{name: {name}, label: s, at_least: 0.5}}]"
    with pytest.raises(ValueError, match="every reward that counts has `at_least`"):
        load([constrained, "extensions=[multipliers]"])
    with pytest.raises(ValueError, match=r"nothing finds its weight; add \{name: multipliers\} to extensions"):
        load([f"rewards=[{{name: {name}, label: r}}, {{name: {name}, label: s, at_least: 0.5}}]"])
    with pytest.raises(ValueError, match="no reward has `at_least`"):
        load([f"rewards=[{{name: {name}}}]", "extensions=[multipliers]"])
    with pytest.raises(ValueError, match="they all have weight 0"):
        load(["advantage.scale=group", f"rewards=[{{name: {name}, label: r, weight: 0}}, {{name: {name}, {apart}}}]"])
    assert load([f"rewards=[{{name: {name}, weight: -1}}]"]).rewards[0].weight == -1
