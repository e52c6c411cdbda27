"""Every recipe of the package runs on a small random pipeline, and starts from ratios of exactly 1."""

import json
from pathlib import Path

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe, recipe_names
from flowgrpo.training.credit.from_scores import Credit
from flowgrpo.training.planning import forecast, planner, scouts_evaluations
from flowgrpo.training.session import start

WITH_GRADIENT = ("diffusion_opsd", "direct_align", "draft", "drtune", "refl")
"""Recipes whose rewards need a gradient."""
ALONE = (*(name for name in WITH_GRADIENT if name != "diffusion_opsd"), "d_opsd")
"""Recipes in which no image is compared with another, so that a prompt has one."""
PUBLISHED = [
    name
    for name in recipe_names("images")
    if name
    not in (
        "default",
        "mixgrpo_flash_guard",
        "mixgrpo_guard",
        "ac_flow",
        "diffusion_dpo",
        "euphonium",
        "flow_dpo",
        "loop_diffusion",
        *WITH_GRADIENT,
    )
] + ["spg"]


@pytest.mark.parametrize("name", recipe_names("images"))
def test_a_recipe_trains_from_ratios_of_exactly_one(name: str, random_pipeline: Path, tmp_path: Path) -> None:
    rewards = {
        "pref_grpo": "[{name: win_rate, options: {judge: jpeg_compressibility}}]",
        # Its extension ranks images by a light reward too.
        "gardo": "[{name: jpeg_compressibility}, {name: paint, weight: 0}]",
        **dict.fromkeys(WITH_GRADIENT, "[{name: proxy}]"),
    }
    overrides = [
        f"model.path={random_pipeline}",
        "rollout.prompts=2",
        f"rewards={rewards.get(name, '[{name: jpeg_compressibility}]')}",
        "evaluate={every: 2, prompts: 1}",
    ]
    # A critic is first used in its second iteration.
    critic = load_recipe(name).critic is not None
    recipe = load_recipe(
        name, [*overrides, *(["run.iterations=2", "critic.warmup=1"] if critic else ["run.iterations=1"])]
    )
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines[: recipe.run.iterations]:
        assert line["ratio/first_error"] == 0.0
        assert (line["degenerate_groups"] < 1.0) == (name not in ALONE)
        assert line["grad_norm"] > 0.0
    plan = planner(
        recipe, recipe.sampler.sigmas or [1 - k / recipe.sampler.steps for k in range(recipe.sampler.steps + 1)]
    )
    assert lines[0]["evaluations"] == 2 * (plan(0).counts().evaluations + scouts_evaluations(recipe))
    result = {"lora": "lora/pytorch_lora_weights.safetensors", "full": "pipeline/model_index.json"}[recipe.model.train]
    assert (tmp_path / "run" / result).is_file()


def test_most_recipes_have_published_settings() -> None:
    assert len(PUBLISHED) >= 20


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_a_recipe_that_can_be_planned(name: str) -> None:
    recipe = load_recipe(f"{name}@published")
    counts = forecast(recipe).counts
    Credit(recipe)
    assert all(count.leaves >= recipe.rollout.group for count in counts)
    assert recipe.model.path != "scenes"


def test_counted_evaluations_are_those_of_the_papers() -> None:
    """TempFlow-GRPO: 279 a seed at T = 10 and six branches; BranchGRPO: 203 at T = 20, splits {0, 3, 6, 9} and K = 2.

    Depth pruning leaves the 138 edges that its paper counts.
    """
    seeds = load_recipe("tempflow_grpo@published")
    assert forecast(seeds).counts[0].evaluations == 279 * seeds.rollout.group
    tree = forecast(load_recipe("branchgrpo@published")).counts[0]
    assert (tree.evaluations, tree.edges, tree.leaves) == (203, 218, 16)
    assert {c.trained_edges for c in forecast(load_recipe("branchgrpo_depth@published")).counts} == {138}
    chains = forecast(load_recipe("flow_grpo@published")).counts[0]
    assert chains.evaluations == chains.chain_evaluations == 240
