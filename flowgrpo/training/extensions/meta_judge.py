"""A judge's instructions, which another judge refines while the policy learns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from ...configs.reading_soundness import reward_place
from ...parts.choice import Choice
from ...parts.needs import needs
from ...parts.ranges import Count, Given, Several
from ...rewards.judges.judge import INSTRUCTIONS
from ...rewards.judges.judge_client import JudgeClient, JudgeServer, Question
from ...rewards.judges.meta_question import about_instructions, read_instructions
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from .extension import Extension, draws_last, names_a_reward, once, reported

VERSION = "instructions_version"
SEEN = "meta_judge/seen"
MAX_TOKENS = 4096


def _judge_has_instructions(recipe: Any, choice: Choice) -> list[str]:
    place = reward_place(recipe.rewards, choice["reward"])
    if place is None:
        return []
    reward = recipe.rewards[place]
    if reward.name == "judge" and reward.options.get(INSTRUCTIONS):
        return []
    return [
        f"extension meta_judge refines the `instructions` of a reward `judge`, and {reward.known_as} has none; give it "
        'options such as {instructions: "Is it right?", prompt: "{instructions} {prompt} {completion} Score: 0 to 10"}'
    ]


@needs(once, names_a_reward, _judge_has_instructions, draws_last("gives prompts a column"))
class MetaJudge(Extension):
    """Lets a second judge refine the instructions of a reward `judge` (Meta Policy Optimization, 2504.20157).

    Every `every` iterations, the second judge sees the instructions with the best and the worst samples of the
    iteration, their scores and the judge's reasons. It looks for what the policy does to please the judge without being
    good, and writes new instructions. They hold from the next iteration on. The form of the question and of the score
    stays, because it is in the `prompt` of the judge. If the second judge writes nothing that can be read, the
    instructions stay.

    The instructions of an iteration are the column `instructions` of its prompts, and their number, from 0, is the
    column `instructions_version`. So every saved sample says by which instructions it was scored. All versions are in
    the checkpoints. Evaluations use the instructions of the recipe throughout: their scores stay comparable.

    The second judge is asked at the server of the reward.

    Args:
        reward: Label (or name) of the reward `judge`.
        every: Number of iterations between two versions.
        samples: Number of samples that the second judge sees, half of them the best.
        model: The server's name of the second judge; the name of the reward's judge if left out.
    """

    def __init__(
        self,
        *,
        reward: str,
        every: Count = 10,
        samples: Several = 8,
        model: Annotated[str, Field(min_length=1)] | None = None,
        recipe: Given[Any],
        trained: Given[Sequence[str]],
    ) -> None:
        place = reward_place(recipe.rewards, reward)
        assert place is not None
        options = recipe.rewards[place].options
        self.reward, self.every, self.samples = reported(recipe, trained, reward), every, samples
        server = JudgeServer.read("meta_judge", options["server"])
        self.server = server if model is None else replace(server, model=model)
        self.versions, self.since = [str(options[INSTRUCTIONS])], [0]
        self._due, self._iteration, self._failed = False, 0, 0

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """Give each prompt the instructions of the iteration."""
        self._iteration, self._due = iteration, (iteration + 1) % self.every == 0
        added = {INSTRUCTIONS: self.versions[-1], VERSION: len(self.versions) - 1}
        return [replace(row, columns={**row.columns, **added}) for row in rows]

    def samples_scored(self, batch: Batch) -> Batch:
        """Share what the second judge may see, in the iterations in which it is asked."""
        if self._due:
            texts, notes = batch.experience.samples, batch.scores.notes.get(self.reward)
            batch.columns[SEEN] = [
                (batch.rows[p].text, text if isinstance(text, str) else "", notes[row] if notes else "")
                for row, (p, text) in enumerate(zip(batch.experience.prompt_of_sample, texts))
            ]
        return batch

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Ask for new instructions, if it is time."""
        if not self._due:
            return
        scores = samples.scores.values[:, samples.scores.names.index(self.reward)].tolist()
        found = self._asked(scores, samples.columns[SEEN]) if self.processes.rank == 0 else None
        # The second judge may answer each process differently, so all take what the first was told.
        (refined, *_) = self.processes.gather(found)
        if refined is None:
            self._failed += 1
        elif refined != self.versions[-1]:
            self.versions, self.since = [*self.versions, refined], [*self.since, self._iteration + 1]

    def _asked(self, scores: Sequence[float], seen: Sequence[tuple[str, str, str]]) -> str | None:
        shown = [(scores[row], *seen[row]) for row in best_and_worst(scores, self.samples)]
        with closing(JudgeClient("meta_judge", self.server, max_tokens=MAX_TOKENS)) as client:
            (answer,) = client.ask([Question(about_instructions(self.versions[-1], shown))])
        return read_instructions(answer)

    def record(self) -> dict[str, float]:
        """The number of the instructions from the next iteration on, and how often none could be read."""
        return {"meta_judge/version": len(self.versions) - 1.0, "meta_judge/unread": float(self._failed)}

    def state_dict(self) -> dict[str, Any]:
        """All versions, the iteration from which each holds, and how often none could be read."""
        return {"versions": self.versions, "since": self.since, "failed": self._failed}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""
        self.versions, self.since = list(state["versions"]), list(state["since"])
        self._failed = state["failed"]


def best_and_worst(scores: Sequence[float], count: int) -> list[int]:
    """The places of the `count` best and worst scores, the best first, one more of the best if `count` is odd.

    NaN is left out. Of equal scores the earlier comes first.
    """
    ranked = sorted((row for row, s in enumerate(scores) if not math.isnan(s)), key=lambda row: -scores[row])
    half = (count + 1) // 2
    return ranked if len(ranked) <= count else [*ranked[:half], *ranked[half - count :]]
