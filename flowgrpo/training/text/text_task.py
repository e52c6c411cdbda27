"""Completions of a causal language model as a task of the training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ...configs.schema import TextRecipe
from ...configs.sections import EmaConfig
from ...parts.traits import rewarded
from ...rewards.runner import RewardBatch
from ..controls import Controls
from ..data import PromptRow
from ..folder.checkpoint import Stateful
from ..losses.objective import Objective
from ..planning import budget_line, clip_of, parts_line
from ..reporting.clock import Clock
from ..tasks import Decoded, PolicyTask, Score, trained_numbers
from ..teachers import own_teacher, teachers_of
from .forms import PLAIN
from .text_policy import Completions, TextPolicy, complete_seeded
from .writing import Writer


class TextTask(PolicyTask):
    """Completions of a causal language model.

    Args:
        recipe: what to do.
        policy: samples and scores.
    """

    noun = "texts"
    clock_parts: tuple[str, ...] = ("sampling", "scoring", "reward", "optimizer", "rest")
    update_part = "scoring"

    def __init__(self, recipe: TextRecipe, policy: TextPolicy) -> None:
        self.recipe, self.policy = recipe, policy
        self.controls = Controls(recipe.objective.get("entropy"), recipe.objective.get("variance"))
        self._form = recipe.rollout.form
        self._score: Score | None = None

    @property
    def result(self) -> str:
        """`lora`, or `model` for full weights."""
        return "lora" if self.weights.kind == "lora" else "model"

    def score_with(self, score: Score) -> None:
        """Let the form of the rollout ask the rewards of the run."""
        self._score = score

    def followers(self) -> dict[str, EmaConfig | None]:
        """The average that teaches the policy, if the recipe asks for one."""
        return {"compared": self.recipe.objective.get("ema")}

    def objective(self, recipe: TextRecipe, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """The loss of a recipe."""
        self.policy.average = old
        engine = recipe.generation.engine
        made: Objective = recipe.objective.make(recipe, self.policy, self.controls, engine=engine)
        return made

    def rollout(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        iteration: int,
        clock: Clock,
        cuts: Sequence[int],
        decoded: Decoded | None = None,
    ) -> Completions:
        """Sample a group of completions of each prompt, all in one chunk."""
        recipe = self.recipe
        count, group = clock.count, recipe.rollout.group
        with clock.part("sampling"):
            found = self._written(
                rows, keys, group, self._form.name != PLAIN, iteration=iteration, score=self._score,
                temperature=recipe.generation.temperature, batch=recipe.rollout.batch,
                seen=lambda done: count(min(done, len(rows) * group), len(rows) * group),
            )  # fmt: skip
        drop = bool(recipe.objective.get("drop_truncated"))
        return replace(
            found, updates=len(cuts) + 1, cuts=tuple(cuts), drop_truncated=drop,
            taught_by=teachers_of(recipe.model, rows),
        )  # fmt: skip

    def evaluation(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        clock: Clock,
        seen: Callable[[int], None] | None = None,
        made: Callable[[Completions], None] | None = None,
    ) -> Completions:
        """Sample completions at the temperature of evaluations.

        Args:
            rows: the prompts.
            keys: one number for each, which addresses its randomness.
            clock: of the run.
            seen: called with the number of completions so far.
            made: called with the completions of each batch, see `complete_seeded`; not called where a form writes them.
        """
        settings = self.recipe.evaluate
        total = len(rows) * settings.seeds

        def done(count: int) -> None:
            # A form may write a completion in several stages.
            clock.count(min(count, total), total)
            if seen is not None:
                seen(min(count, total))

        with clock.part("sampling"):
            return self._written(
                rows, keys, settings.seeds, self._formed, iteration=None,
                score=None, temperature=settings.temperature, batch=settings.batch or self.recipe.rollout.batch,
                seen=done, **({} if self._formed else {"made": made}),
            )  # fmt: skip

    def at_once(self, count: int) -> int:
        """How many prompts with `count` completions each fill a batch."""
        return max((self.recipe.evaluate.batch or self.recipe.rollout.batch) // count, 1)

    def seeded(self, rows: Sequence[PromptRow], seeds: Sequence[int], count: int, temperature: float) -> Completions:
        """`count` completions of each of P prompts, made as in evaluations; each depends on its own seed alone.

        Args:
            rows: P prompts.
            seeds: P times `count` seeds, prompt by prompt.
            count: completions of a prompt.
            temperature: 0 takes the likeliest token.

        Raises:
            ValueError: the form of the recipe makes several completions where one is asked.
        """
        recipe = self.recipe
        batch = recipe.evaluate.batch or recipe.rollout.batch
        if not self._formed:
            return complete_seeded(
                self.policy.language, rows, seeds, count, recipe.generation, batch=batch, temperature=temperature
            )
        # Each completion is the only one of a group, because completions of a group may depend on each other.
        each = [row for row in rows for _ in range(count)]
        alone = Writer(self.policy, each, seeds, 1, iteration=None, temperature=temperature, batch=batch, score=None)
        found = sorted(self._form.make()(alone), key=lambda one: one.prompt)
        if [one.prompt for one in found] != list(range(len(each))):
            raise ValueError(
                f"form {self._form.short} made {len(found)} completions where {len(each)} were asked, one for each "
                "seed; make as many as writer.group of each prompt"
            )
        together = Writer(self.policy, rows, seeds[::count], count, iteration=None, temperature=temperature,
                          batch=batch, score=None)  # fmt: skip
        return together.completions([replace(one, prompt=one.prompt // count) for one in found])

    @property
    def _formed(self) -> bool:
        """Whether evaluations use the form of the recipe."""
        return getattr(self._form.target, "in_evaluations", False)

    def _written(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        group: int,
        formed: bool,
        *,
        iteration: int | None,
        score: Score | None,
        **settings: Any,
    ) -> Completions:
        """Completions of prompts: with `formed` by the form of the recipe, else each from its beginning to its end."""
        if not formed:
            return self.policy.sample(rows, keys, group, **settings)
        writer = Writer(self.policy, rows, keys, group, iteration=iteration, score=score, **settings)
        return self.policy.cut(writer.completions(self._form.make()(writer)))

    def learn(self, experience: Completions, scores: RewardBatch) -> dict[str, float]:
        """Nothing: only the policy learns."""
        return {}

    def credit_model(self) -> None:
        """None: there is no critic of completions."""

    def parts(self) -> dict[str, Stateful]:
        """The coefficients that move."""
        return self.controls.parts()

    def describe(self) -> Iterator[str]:
        """Lines on the model, sizes and the clip."""
        recipe, optimizer = self.recipe, self.recipe.optimizer
        surrogate = recipe.objective.get("surrogate") if rewarded(recipe) else None
        low, high = (math.inf, math.inf) if surrogate is None else clip_of(surrogate.make())
        clip = f", clip -{low:g} +{high:g}" if high != math.inf else ""
        steps = optimizer.updates * optimizer.epochs
        yield (
            f"{recipe.name}: {type(self.policy.language.model).__name__} ({recipe.model.path}), {recipe.model.train}, "
            f"{trained_numbers(self):,} trained parameters"
        )
        yield (
            f"{recipe.rollout.prompts} prompts × {recipe.rollout.group} completions an iteration, at most "
            f"{recipe.generation.max_tokens} tokens, {steps} optimizer step{'' if steps == 1 else 's'}{clip}"
        )
        teachers = ", ".join(dict.fromkeys(teacher.path for teacher in recipe.model.teachers))
        if weights := own_teacher(recipe):
            teachers = f"itself, with {weights}"
        if teachers:
            yield f"taught by {teachers}" + ("" if rewarded(recipe) else "; rewards are only reported")
        if (line := budget_line(recipe)) is not None:
            yield line
        if (line := parts_line(recipe)) is not None:
            yield line
        if recipe.generation.engine != "transformers":
            correction = recipe.objective.get("correction")
            kind = "none" if correction is None else correction.short
            yield (
                f"{recipe.generation.engine} samples the completions, with correction {kind}; see sampler_gap in the "
                "metrics"
            )
        if steps == 1 and surrogate is not None and surrogate.name == "clip":
            yield "note: one optimizer step per rollout is strictly on-policy: the ratio is 1 and the clip never binds"

    def samples_per_iteration(self) -> int:
        """Completions of all processes in an iteration."""
        return self.recipe.rollout.prompts * self.recipe.rollout.group
