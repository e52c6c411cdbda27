"""A judge's instructions, which another judge refines while the policy learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.selection import select
from ...parts.needs import needs
from ...parts.ranges import Count, Given, Several
from ...rewards.judges.judge import INSTRUCTIONS
from ...rewards.judges.judge_client import JudgeClient, Question
from ...rewards.judges.meta_question import about_instructions, read_instructions
from ...rewards.judges.served_judge import reading_of
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from .extension import Extension, Rewards
from .rules import draws_last, names_a_reward, of_reward, once

VERSION = "instructions_version"
SEEN = "meta_judge/seen"
MAX_TOKENS = 4096


@needs(
    once, names_a_reward, draws_last("gives prompts a column"),
    of_reward(
        lambda reward: reward.name == "judge" and bool(reward.options.get(INSTRUCTIONS)),
        "refines the `instructions` of a reward `judge`, and {reward} has none; give it options such as "
        '{instructions: "Is it right?", prompt: "{instructions} {prompt} {completion} Score: 0 to 10"}',
    ),
)  # fmt: skip
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

    Args:
        reward: Label (or name) of the reward `judge`.
        every: Number of iterations between two versions.
        samples: Number of samples that the second judge sees, half of them the best.
        server: Server of the second judge, as for the reward. A field that is left out, such as `url`, is as in the
            reward's own `server`.
    """

    remembers = ("versions", "since", "unread")

    def __init__(
        self,
        *,
        reward: str,
        every: Count = 10,
        samples: Several = 8,
        server: dict[str, Any] | None = None,
        rewards: Given[Rewards],
    ) -> None:
        self.reward, self.every, self.samples = rewards.reported(reward), every, samples
        options = rewards.options(reward)
        self.client = JudgeClient("meta_judge", {**options["server"], **(server or {})}, max_tokens=MAX_TOKENS)
        self.versions, self.since, self.unread = [str(options[INSTRUCTIONS])], [0], 0

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """Give each prompt the instructions of the iteration."""
        self.iteration, self._due = iteration, (iteration + 1) % self.every == 0
        return [row.with_columns({INSTRUCTIONS: self.versions[-1], VERSION: len(self.versions) - 1}) for row in rows]

    def samples_scored(self, batch: Batch) -> Batch:
        """Share what the second judge may see, in the iterations in which it is asked."""
        if self._due:
            tasks = [batch.rows[p].text for p in batch.experience.prompt_of_sample]
            texts = [text if isinstance(text, str) else "" for text in batch.experience.samples]
            batch.columns[SEEN] = list(zip(tasks, texts, batch.scores.notes.get(self.reward) or [""] * len(tasks)))
        return batch

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Ask for new instructions, if it is time."""
        if self._due:
            # The second judge may answer each process differently, so all take what the first was told.
            (refined, *_) = self.processes.gather(self._asked(samples) if self.processes.rank == 0 else None)
            self.unread += refined is None
            if refined not in (None, self.versions[-1]):
                self.versions, self.since = [*self.versions, refined], [*self.since, self.iteration + 1]

    def _asked(self, samples: Pooled) -> str | None:
        scores = samples.scores.values[:, samples.scores.names.index(self.reward)]
        kept = select(scores, [0] * len(scores), self.samples).nonzero().flatten().tolist()
        shown = sorted(((float(scores[row]), *samples.columns[SEEN][row]) for row in kept), key=lambda one: -one[0])
        question = Question(about_instructions(self.versions[-1], shown))
        return reading_of(read_instructions, *self.client.ask([question])).answer

    def record(self) -> dict[str, float]:
        """The number of the instructions from the next iteration on, and how often none could be read."""
        return {"meta_judge/version": len(self.versions) - 1.0, "meta_judge/unread": float(self.unread)}
