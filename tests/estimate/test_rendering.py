"""Estimates of the pipelines of reward `rendered` against what the allocator really allocates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import TextRecipe
from flowgrpo.estimate.estimates import GPUS
from flowgrpo.estimate.language import estimate_text, text_table
from flowgrpo.estimate.memory import at_once
from flowgrpo.estimate.rendering import PIPELINES, with_pipelines
from flowgrpo.inference.rendered import Rendered, painters_of
from flowgrpo.rewards.base import RewardSpec
from tests.allocation import most_bytes


def entry(**changes: Any) -> RewardSpec:
    settings = ["evaluate.steps=2", "rollout.batch=16", "rollout.decode_batch=16"]
    return RewardSpec("rendered", options={"reward": "gold", "model": "scenes", "set": settings, **changes})


@pytest.fixture
def recipe() -> TextRecipe:
    found = load_recipe("text", ["rewards=[{name: digit_share}]"])
    assert isinstance(found, TextRecipe)
    return found


def test_each_pipeline_is_counted_once(recipe: TextRecipe) -> None:
    plain = estimate_text(recipe, [])
    assert with_pipelines(plain, painters_of([RewardSpec("digit_share")])) is plain
    assert any("rewards are not counted" in line for line in text_table(plain))
    one = with_pipelines(plain, painters_of([entry(), entry(count=3)]))
    two = with_pipelines(plain, painters_of([entry(), entry(set=["rollout.batch=32"])]))
    assert two.resting[PIPELINES] == 2 * one.resting[PIPELINES]
    assert two.passing["rendering"] > one.passing["rendering"]
    rest = sum(plain.resting.values()) - plain.resting["gradients"]
    assert at_once(one.resting, one.passing)["rendering"] == rest + one.resting[PIPELINES] + one.passing["rendering"]
    assert any("of rewards, only the pipelines of rendered are counted" in line for line in text_table(one))


def test_what_does_not_fit_has_advice_of_its_own(recipe: TextRecipe) -> None:
    found = with_pipelines(estimate_text(recipe, [], "4090"), painters_of([entry()]))
    room = int(GPUS["4090"].gib * 2**30)
    much = replace(found, passing={**found.passing, "rendering": room})
    assert "for rendering, a smaller rollout.batch or rollout.decode_batch in `set` of rendered" in text_table(much)[-1]
    heavy = replace(found, resting={**found.resting, PIPELINES: room})
    assert text_table(heavy)[-1].endswith("or serve rendered on another card")


def test_a_pipeline_of_unknown_shapes_is_said(recipe: TextRecipe) -> None:
    with pytest.raises(ValueError, match="nobody/nothing"):
        with_pipelines(estimate_text(recipe, []), painters_of([entry(model="nobody/nothing")]))


@pytest.mark.slow
def test_rendering_allocates_what_was_estimated(recipe: TextRecipe, tmp_path: Path) -> None:
    plain, spec = estimate_text(recipe, []), entry()
    found = with_pipelines(plain, painters_of([spec]))
    reward = Rendered(**spec.options)
    painter = reward._painter.value
    modules = [part for part in painter._opened.pipe.components.values() if isinstance(part, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    assert found.resting[PIPELINES] == pytest.approx(sum(t.numel() * t.element_size() for t in tensors), rel=1e-4)
    painter.images([("a red star", 0)], False)
    asked = [(f"{k} red stars", k) for k in range(16)]
    most = most_bytes(lambda: painter.images(asked, False), tmp_path / "trace.json")
    assert found.passing["rendering"] == pytest.approx(most, rel=0.05)
    reward.close()
