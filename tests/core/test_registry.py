"""Estimators by name: each takes rewards and ids, and a choice that cannot be is refused."""

import inspect

import pytest
import torch

from flowgrpo.core.baselines import virtual_maximum_advantages
from flowgrpo.core.registry import ADVANTAGES, advantage_of

REWARDS, GROUPS = torch.tensor([0.0, 1, 0, 0]), torch.tensor([0, 0, 1, 1])


def test_every_name_takes_rewards_and_ids():
    assert sorted(ADVANTAGES) == [
        "anchored",
        "beta",
        "consistency",
        "group",
        "quantile",
        "stratified",
        "virtual_maximum",
    ]
    for name, function in ADVANTAGES.items():
        ids = [GROUPS, GROUPS] if name == "stratified" else [GROUPS]
        options = list(inspect.signature(function).parameters.values())[1 + len(ids) :]
        assert [p.kind for p in options] == [inspect.Parameter.KEYWORD_ONLY] * len(options)
        found = advantage_of(name)(REWARDS, *ids)
        assert found.shape == (4,)
        assert found[0] < found[1]


def test_options_reach_the_function():
    found = advantage_of("virtual_maximum", {"maximum": 2.0, "ddof": 0})(REWARDS, GROUPS)
    assert torch.equal(found, virtual_maximum_advantages(REWARDS, GROUPS, maximum=2.0, ddof=0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {}, "there is no advantage 'grpo'; use one of group, anchored"),
        ("beta", {"eps": 1.0}, "'eps', which advantage beta does not take; it takes none"),
        ("quantile", {"level": 0.1}, "'level', which advantage quantile does not take; it takes low, high"),
        ("quantile", {"low": 0.9}, "use 0 <= low < high <= 1"),
        ("group", {"scale": "std"}, "`scale` is 'std'"),
        ("stratified", {"alpha": 1.5}, "`alpha` is 1.5"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_at_once(name, options, message):
    with pytest.raises(ValueError, match=message):
        advantage_of(name, options)
