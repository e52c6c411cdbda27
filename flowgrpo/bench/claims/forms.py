"""Recipes in the proportions of their papers, small enough for the embedded pipeline.

A form has the sampler, group, objective, advantage, credit, penalties, updates and averages of a recipe's published
section, or of the recipe itself where there is no such section. Model, data, evaluation, learning rate and sizes of
batches come from the embedded recipe. The number of prompts in an iteration is the paper's number, divided by
`PROMPTS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...configs.layers import layers
from ...configs.load import load_image_recipe
from ...configs.schema import Recipe
from ...parts.choice import plain
from ...training.planning import Nfe, forecast, levels_of, nfe_of, planner

PROMPTS = 8
"""The prompts of an iteration are the paper's prompts divided by this number."""
PAPER_ITERATIONS = 300
"""Length of the papers' runs on FLUX, over which a moving window moves."""
# Samples of a prompt that start from one noise share all states before their first stochastic step. The papers' code
# computes these states again for each sample.
UNSHARED = "sampler.plan.shared_noise=false"
# BranchGRPO deals batches of states out to its updates, so it needs many small ones. Its baseline has batches of the
# same size, because they are compared by time.
SMALL_BATCHES = "rollout.batch=8"
TRAINED_ON = "{name: paint, options: {amount: 2.0}}"
"""The reward of every run, unless its claim is about another reward."""
REWARD = f"rewards=[{TRAINED_ON}]"
_EMBEDDED = ("model", "data", "evaluate")
_EMBEDDED_OPTIONS = {"optimizer": ("learning_rate", "schedule", "warmup"), "rollout": ("batch", "decode_batch")}


@dataclass(frozen=True)
class Form:
    """A recipe in its paper's proportions.

    Attributes:
        method: a recipe of the package.
        changes: `key=value` changes to its published settings, before the prompts are scaled.
    """

    method: str
    changes: tuple[str, ...] = ()

    @property
    def published(self) -> bool:
        """Whether the method has published settings; if not, the form is the embedded recipe."""
        return _is_published(self.method)

    def paper(self) -> Recipe:
        """The published recipe with the changes, or the embedded recipe where nothing is published."""
        return load_image_recipe(f"{self.method}@published" if self.published else self.method, [REWARD, *self.changes])

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe of the form.

        Args:
            overrides: `key=value` changes that come last, after the prompts are scaled.
        """
        if not self.published:
            return load_image_recipe(self.method, [REWARD, *self.changes, *overrides])
        source = f"{self.method}@published"
        words = [*embedded_words(self.method), *self.changes]
        # The published prompts are read before they are changed; updates then need as many prompts as there are.
        paper = self.paper()
        groups = paper.optimizer.updates if paper.optimizer.cut == "prompts" else 1
        prompts = max(round(paper.rollout.prompts / PROMPTS), groups)
        words.append(f"rollout.prompts={prompts}")
        if paper.optimizer.cut == "edges":
            words.append(f"rollout.batch={_batch_for_updates(load_image_recipe(source, words))}")
        return load_image_recipe(source, [*words, *overrides])


def _batch_for_updates(recipe: Recipe) -> int:
    """The largest size of batches that cuts a rollout into enough batches for its updates, by halving the recipe's."""
    plan, prompts, batch = planner(recipe, levels_of(recipe))(0), recipe.rollout.prompts, recipe.rollout.batch
    states = [plan.main_states[i] * prompts for i in plan.trained_steps]
    while batch > 1 and sum(math.ceil(count / batch) for count in states) < recipe.optimizer.updates:
        batch //= 2
    return batch


def _is_published(method: str) -> bool:
    try:
        layers(f"{method}@published")
    except ValueError:
        return False
    return True


def embedded_words(method: str) -> list[str]:
    """The embedded settings of a method, as `key=value` changes."""
    own: dict[str, Any] = plain(load_image_recipe(method))
    words = [f"{key}={json.dumps(own[key])}" for key in _EMBEDDED]
    # A reward of the published recipe may need a server; a run of the claims names its reward anyway.
    words.append(REWARD)
    for section, options in _EMBEDDED_OPTIONS.items():
        words += [f"{section}.{option}={json.dumps(own[section][option])}" for option in options]
    return words


def nfe(recipe: Recipe, iterations: int = PAPER_ITERATIONS) -> Nfe:
    """Evaluations for an image over a run of the papers' length."""
    longer = recipe.model_copy(update={"run": recipe.run.model_copy(update={"iterations": iterations})})
    return nfe_of(longer, forecast(longer))


FORMS: dict[str, Form] = {
    "dance_grpo": Form("dance_grpo"),
    "dance_grpo_4of25": Form("dance_grpo", ("sampler.plan.window.size=4",)),
    "mixgrpo": Form("mixgrpo"),
    "mixgrpo_flash": Form("mixgrpo_flash"),
    "mixgrpo_flash_star": Form("mixgrpo_flash_star"),
    # BranchGRPO's baselines have its 20 steps and its images; two of 16 prompts are left, so there are two updates.
    "dance_grpo_19of20": Form(
        "dance_grpo",
        (
            "sampler.steps=20",
            "sampler.plan.window.size=19",
            "rollout.prompts=16",
            "rollout.group=16",
            "optimizer.updates=2",
            SMALL_BATCHES,
        ),
    ),
    "dance_grpo_12of20": Form(
        "dance_grpo",
        (
            "sampler.steps=20",
            "sampler.plan.window.size=12",
            "rollout.prompts=16",
            "rollout.group=16",
            "optimizer.updates=2",
            SMALL_BATCHES,
        ),
    ),
    "branchgrpo": Form("branchgrpo", (SMALL_BATCHES,)),
    "branchgrpo_depth": Form("branchgrpo_depth", (SMALL_BATCHES,)),
    "branchgrpo_mix": Form("branchgrpo_mix", (SMALL_BATCHES,)),
    "flow_grpo": Form("flow_grpo"),
    "tempflow_grpo": Form("tempflow_grpo"),
    "grpo_guard": Form("grpo_guard"),
    "pref_grpo": Form("pref_grpo"),
    "vgpo": Form("vgpo"),
    "diffusion_nft": Form("diffusion_nft"),
    "sage_grpo": Form("sage_grpo"),
    "loop_diffusion": Form("loop_diffusion"),
}
"""The forms that claims compare by name: a method, or a baseline with what a paper changes in it."""
