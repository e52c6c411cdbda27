"""Completions of a masked language model as a task of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from ...configs.schema import MaskedRecipe
from ...configs.sections import EmaConfig
from ...pipelines.experience import join_experiences
from ...rewards.runner import RewardBatch
from ...samplers.plans import Plan, StepPlan
from ...samplers.transitions import chunks_of
from ...samplers.unmasking import unmask_kernel
from ..controls import Controls
from ..data import PromptRow
from ..folder.checkpoint import Stateful
from ..losses.objective import Objective
from ..planning import budget_line, forecast, levels_of, planner
from ..recipe_prompts import given_columns
from ..reporting.clock import Clock
from ..tasks import Decoded, PolicyTask, trained_numbers
from ..text.forms.from_data import answer_of
from .masked_policy import MaskedPolicy, UnmaskedTexts


class MaskedTask(PolicyTask):
    """Completions of a masked language model.

    Args:
        recipe: what to do.
        policy: samples and scores.
    """

    noun = "texts"
    clock_parts: tuple[str, ...] = ("sampling", "scoring", "reward", "optimizer", "rest")
    update_part = "scoring"

    def __init__(self, recipe: MaskedRecipe, policy: MaskedPolicy) -> None:
        self.recipe, self.policy = recipe, policy
        self.plan_for = planner(recipe, levels_of(recipe))
        self._evaluated = levels_of(recipe, evaluation=True)
        self.controls = Controls()

    @property
    def result(self) -> str:
        """`lora`, or `model` for full weights."""
        return "lora" if self.weights.kind == "lora" else "model"

    def followers(self) -> dict[str, EmaConfig | None]:
        """No averages."""
        return {}

    def objective(self, recipe: MaskedRecipe, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """The loss of a recipe."""
        made: Objective = recipe.objective.make(recipe, self.policy, self.controls)
        return made

    def rollout(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        iteration: int,
        clock: Clock,
        cuts: Sequence[int],
        decoded: Decoded | None = None,
    ) -> UnmaskedTexts:
        """Roll out the plan of an iteration, chunk by chunk."""
        return self._sampled(rows, keys, self.plan_for(iteration), clock, self.recipe.rollout.chunk, cuts, decoded)

    def evaluation(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        clock: Clock,
        seen: Callable[[int], None] | None = None,
        made: Callable[[UnmaskedTexts], None] | None = None,
    ) -> UnmaskedTexts:
        """Unmask held-out prompts at the temperature of evaluations.

        Args:
            rows: the prompts.
            keys: one number for each, which addresses its randomness.
            clock: of the run.
            seen: called with the number of samples so far.
            made: called with the samples of each batch.
        """
        count = self.recipe.evaluate.seeds
        plan = self._plain_plan(count, self.recipe.evaluate.temperature)

        def done(part: UnmaskedTexts) -> None:
            if made is not None:
                made(part)
            if seen is not None:
                seen((max(part.prompt_of_sample) + 1) * count)

        return self._sampled(rows, keys, plan, clock, self.at_once(count), (), done)

    def seeded(self, rows: Sequence[PromptRow], seeds: Sequence[int], count: int, temperature: float) -> UnmaskedTexts:
        """`count` texts of each of P prompts; each depends on its own seed alone.

        Args:
            rows: P prompts.
            seeds: P times `count` seeds, prompt by prompt.
            count: texts of a prompt.
            temperature: 0 takes the likeliest tokens.
        """
        clock = Clock(self.device, self.clock_parts)
        plan, keys = self._plain_plan(count, temperature), list(seeds[::count])
        return self._sampled(rows, keys, plan, clock, self.at_once(count), (), None, seeds)

    def _plain_plan(self, roots: int, temperature: float) -> Plan:
        """Chains over the evaluation's steps that train nothing."""
        step = StepPlan(kernel=unmask_kernel(temperature)) if temperature > 0 else StepPlan()
        return Plan(self._evaluated, (step,) * (len(self._evaluated) - 1), roots=roots)

    def at_once(self, count: int) -> int:
        """How many prompts with `count` texts each fill a batch."""
        return max(self.recipe.rollout.batch // count, 1)

    def _sampled(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        plan: Plan,
        clock: Clock,
        size: int | None,
        cuts: Sequence[int],
        decoded: Callable[[UnmaskedTexts], None] | None,
        seeds: Sequence[int] | None = None,
    ) -> UnmaskedTexts:
        prompts, chunks = tuple(row.text for row in rows), []
        frames = tuple(self.policy.frame(row.text, row.messages) for row in rows)
        for chunk in chunks_of(len(rows), size):
            mine = None if seeds is None else seeds[chunk.start * plan.roots : chunk.stop * plan.roots]
            with clock.part("sampling"):
                if plan.given:
                    rollout = self.policy.given(self._answers(rows, chunk), plan, chunk)
                else:
                    rollout = self.policy.sample(frames, keys, plan, cuts, chunk, clock.count, mine)
                texts = self.policy.decode(rollout)
            found = UnmaskedTexts(
                rollout, plan, prompts, texts, len(cuts) + 1, tuple(keys), tuple(cuts),
                by_edges=self.recipe.optimizer.cut == "edges", decode=self.policy.language.decode,
                frames=frames,
            )  # fmt: skip
            chunks.append(found)
            if decoded is not None and size is not None:
                decoded(found)
        joint = join_experiences(list(chunks))
        assert isinstance(joint, UnmaskedTexts)
        return joint

    def _answers(self, rows: Sequence[PromptRow], chunk: slice) -> list[str]:
        """The completions that the data give to the prompts of a chunk, prompt by prompt."""
        return [answer_of(row, column) for row in rows[chunk] for column in given_columns(self.recipe)]

    def learn(self, experience: UnmaskedTexts, scores: RewardBatch) -> dict[str, float]:
        """Nothing: only the policy learns."""
        return {}

    def credit_model(self) -> None:
        """None: there is no critic of masked completions."""

    def parts(self) -> dict[str, Stateful]:
        """Nothing moves besides the weights."""
        return self.controls.parts()

    def describe(self) -> Iterator[str]:
        """Lines on the model and on sizes."""
        recipe, expected = self.recipe, forecast(self.recipe)
        steps = expected.optimizer_steps
        yield (
            f"{recipe.name}: {type(self.policy.language.model).__name__} ({recipe.model.path}), {recipe.model.train}, "
            f"{trained_numbers(self):,} trained parameters"
        )
        yield (
            f"{recipe.rollout.prompts} prompts × {expected.images // recipe.rollout.prompts} completions an iteration, "
            f"{recipe.generation.tokens} tokens{'' if given_columns(recipe) else f' in {recipe.sampler.steps} steps'}, "
            f"{steps} optimizer step{'' if steps == 1 else 's'}"
        )
        if (line := budget_line(recipe)) is not None:
            yield line
        yield from (f"note: {warning}" for warning in expected.warnings)

    def samples_per_iteration(self) -> int:
        """Completions of all processes in an iteration."""
        return forecast(self.recipe).images
