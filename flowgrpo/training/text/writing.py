"""Completions in several stages: a form of a rollout gets a `Writer`, and returns attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...configs.explaining import short
from ...core.addressing import address
from ...rewards.base import OF_GIVEN
from ...text.pictured import PicturedIds, Shown, followed
from ...text.sampling import Sampled, Temperature
from ..data import PromptRow, templated
from .text_policy import Completions

if TYPE_CHECKING:
    from ..tasks import Score
    from .text_policy import TextPolicy


@dataclass(frozen=True)
class Attempt:
    """A completion, and how it came about.

    Attributes:
        prompt: the number of its prompt among the prompts of the rollout. The attempts of a prompt are a group.
        context: ids before the completion. The policy saw them, and they are not trained.
        ids: of the completion.
        log_probs: of each token, under the distribution from which it was drawn; 0 for a token that was not drawn.
        own: whether each token is the policy's, and is trained. The words of a tool are not.
        ended: whether the completion ended with an end token.
        counts: whether the attempt is compared and trained. If not, it is only scored.
        origin: what the index of samples says about the attempt; values of JSON.
    """

    prompt: int
    context: list[int]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    ended: bool = False
    counts: bool = True
    origin: dict[str, Any] = field(default_factory=dict)

    def cut(self, length: int) -> Attempt:
        """The first `length` tokens. They can be continued, as if nothing had been after them."""
        if length >= len(self.ids):
            return self
        return replace(
            self, ids=self.ids[:length], log_probs=self.log_probs[:length], own=self.own[:length], ended=False
        )

    def followed(self, ids: Sequence[int], *, ended: bool = False) -> Attempt:
        """The attempt with further tokens that the policy did not draw, and that are not trained."""
        new = len(ids)
        return replace(
            self, ids=[*self.ids, *ids], log_probs=[*self.log_probs, *[0.0] * new], own=[*self.own, *[False] * new],
            ended=ended,
        )  # fmt: skip

    def trained_from(self, place: int) -> Attempt:
        """The attempt, but its first `place` tokens are not trained."""
        return replace(self, own=[own and t >= place for t, own in enumerate(self.own)])


class Writer:
    """Writes completions of the prompts of a rollout, for a form.

    Args:
        policy: the model.
        rows: P prompts.
        keys: P numbers that address the randomness of each prompt.
        group: completions of a prompt that the recipe asks for.
        iteration: of the run, from 0; None in an evaluation.
        temperature: of the sampling; 0 takes the likeliest token.
        batch: completions sampled at once.
        score: asks the rewards of the run; None in an evaluation, where a form may not ask.
        seen: called after each batch with the number of attempts that were written so far.
    """

    def __init__(
        self,
        policy: TextPolicy,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        group: int,
        *,
        iteration: int | None,
        temperature: float,
        batch: int,
        score: Score | None,
        seen: Callable[[int], None] | None = None,
    ) -> None:
        self.policy, self.rows, self.keys, self.group = policy, list(rows), list(keys), group
        self.iteration, self.temperature, self.batch = iteration, temperature, batch
        self.max_tokens: int = policy.recipe.generation.max_tokens
        self._score, self._seen, self._written = score, seen, 0
        self._contexts: dict[tuple[int, str | None], list[int]] = {}
        self._shown: dict[tuple[Shown, ...], Mapping[str, Tensor]] = {}

    def context(self, prompt: int, template: str | None = None) -> list[int]:
        """Ids of a prompt, or of the prompt within a template that has `{prompt}` in it."""
        if (prompt, template) in self._contexts:
            return self._contexts[prompt, template]
        row = self.rows[prompt] if template is None else templated(self.rows[prompt], template)
        found = self.policy.language.encode(row.text, row.messages, row.pictures)
        if isinstance(found, PicturedIds):
            # Pictures take time to read, and room, and a form may ask for a prompt many times.
            found.inputs = self._shown.setdefault(found.pictures, found.inputs)
            self._contexts[prompt, template] = found
        return found

    def ids(self, text: str) -> list[int]:
        """Ids of a text in the middle of a completion, without special tokens."""
        language = self.policy.language
        found: list[int] = language.tokenizer.encode(language.words(text), add_special_tokens=False)
        return found

    def text(self, attempt: Attempt) -> str:
        """The text of an attempt's completion, as the rewards get it."""
        return self.policy.language.decode(attempt.ids)

    def starts(self, template: str | None = None, count: int | None = None) -> list[Attempt]:
        """`count` attempts without tokens for each prompt; as many as the recipe's group if `count` is None."""
        contexts = [self.context(p, template) for p in range(len(self.rows))]
        return [
            Attempt(p, own) for p, own in enumerate(contexts) for _ in range(self.group if count is None else count)
        ]

    def write(
        self,
        openings: Sequence[Attempt],
        *,
        stage: int = 0,
        limit: int | Sequence[int] | None = None,
        temperature: Temperature | None = None,
    ) -> list[Attempt]:
        """Continue attempts until they end.

        An attempt that has ended, or is as long as its limit, is returned as it is. A token depends on the prompt's
        key, the stage and the attempt's number among the openings of its prompt, and not on other prompts.

        Args:
            openings: attempts; the attempts of a prompt are side by side.
            stage: addresses the randomness; take another number for each call of a rollout.
            limit: the longest completion, opening included, for all or for each; generation.max_tokens if left out.
            temperature: a number, or a function of the logits of the next tokens; the writer's own if left out.
        """
        many = (
            list(limit)
            if isinstance(limit, Sequence)
            else [self.max_tokens if limit is None else limit] * len(openings)
        )
        numbers, seeds = dict[int, int](), list[int]()
        for one in openings:
            number = numbers[one.prompt] = numbers.get(one.prompt, -1) + 1
            seeds.append(address(self.keys[one.prompt], stage, number))
        found = list(openings)
        going = [k for k, one in enumerate(openings) if not one.ended and len(one.ids) < many[k]]
        for first in range(0, len(going), self.batch):
            mine = going[first : first + self.batch]
            found_here = self._continued([openings[k] for k in mine], [seeds[k] for k in mine], temperature,
                                         [many[k] - len(openings[k].ids) for k in mine])  # fmt: skip
            for k, one in zip(mine, found_here):
                found[k] = one
            self._written += len(mine)
            if self._seen is not None:
                self._seen(self._written)
        return found

    def _continued(
        self, openings: list[Attempt], seeds: list[int], temperature: Temperature | None, room: list[int]
    ) -> list[Attempt]:
        """Continue attempts that go on; `room` says by how many tokens at most."""
        before = [followed(one.context, one.ids) for one in openings]
        contexts, owner = list[list[int]](), list[int]()
        for ids in before:
            if not contexts or contexts[-1] != ids:
                contexts.append(ids)
            owner.append(len(contexts) - 1)
        for one, ids, most in zip(openings, before, room):
            self._check_positions(one.prompt, len(ids), most)
        settings = self.policy.recipe.generation
        drawn = self.policy.sampler(
            self.policy.language, contexts, owner, seeds, max_tokens=max(room),
            temperature=self.temperature if temperature is None else temperature,
            top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p, stop=settings.stop,
        )  # fmt: skip
        found = []
        for one, ids, chances, ended, most in zip(openings, drawn.ids, drawn.log_probs, drawn.ended, room):
            stopped = self._stopped(one.ids, ids)
            most = min(most, stopped or most)
            found.append(replace(
                one, ids=one.ids + ids[:most], log_probs=one.log_probs + chances[:most],
                own=one.own + [True] * len(ids[:most]), ended=(ended and len(ids) <= most) or stopped == most,
            ))  # fmt: skip
        return found

    def _stopped(self, before: Sequence[int], drawn: Sequence[int]) -> int | None:
        """After how many drawn tokens a text of `generation.stop` is complete that began before them; None if never."""
        texts = self.policy.recipe.generation.stop
        if not texts or not before:
            return None
        longest, decode = max(map(len, texts)), self.policy.language.decode
        # A token has a letter at least, or it is a part of one: no letter of the longest has more than four.
        tail = list(before[-4 * longest :])
        start = len(decode(tail))
        for count in range(1, len(drawn) + 1):
            text = decode([*tail, *drawn[:count]])
            ends = (text.find(stop, max(start - len(stop) + 1, 0)) for stop in texts)
            if any(0 <= place < start < place + len(stop) for place, stop in zip(ends, texts)):
                return count
            if len(text) >= start + longest:
                return None
        return None

    def _check_positions(self, prompt: int, given: int, more: int) -> None:
        """Raise ValueError if the model has no positions for `given` tokens and `more` tokens after them."""
        room = self.policy.language.positions
        # Nothing follows the last token, so the model never sees it.
        if room is not None and given + more > room + 1:
            raise ValueError(
                f"form {self._form} wants {more} tokens after {given} tokens of the prompt "
                f"{short(self.rows[prompt].text)} and of what the form has added, but the model has positions for "
                f"{room + 1} tokens in all; lower generation.max_tokens or what the form adds"
            )

    def score(self, attempts: Sequence[Attempt]) -> Tensor:
        """[n] weighted sums of the rewards of attempts, NaN where no reward applies. A prompt's attempts are a group.

        Raises:
            ValueError: in an evaluation, where nothing may depend on the rewards.
        """
        if self._score is None:
            raise ValueError("a form that asks rewards cannot be used in evaluations")
        order = sorted(range(len(attempts)), key=lambda k: attempts[k].prompt)
        found = self._score(self.rows, self.policy.cut(self.completions([attempts[k] for k in order], scored=True)))
        values = torch.empty_like(found)
        values[order] = found
        return values

    def log_probs(self, attempts: Sequence[Attempt]) -> list[Tensor]:
        """The policy's log-prob of each token of each attempt, without a gradient."""
        rows = sorted(range(len(attempts)), key=lambda k: attempts[k].prompt)
        asked = self.completions([attempts[k] for k in rows], scored=True)
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for first in range(0, len(rows), self.batch):
                mine = list(range(first, min(first + self.batch, len(rows))))
                values, _ = self.policy.log_probs(asked, mine)
                found |= {rows[k]: own[: len(attempts[rows[k]].ids)].cpu() for k, own in zip(mine, values)}
        return [found[k] for k in range(len(attempts))]

    @property
    def _form(self) -> str:
        return str(self.policy.recipe.rollout.form.short)

    def _sound(self, attempts: Any) -> Sequence[Attempt]:
        """What a form has returned, if it can be a rollout; else raises ValueError."""
        if not isinstance(attempts, Sequence) or not all(isinstance(one, Attempt) for one in attempts):
            raise ValueError(
                f"form {self._form} returned {attempts!r:.80}; return a list of attempts, see Writer.write"
            )
        for one in attempts:
            if not 0 <= one.prompt < len(self.rows):
                raise ValueError(
                    f"form {self._form} made an attempt for prompt {one.prompt}; there are {len(self.rows)}"
                )
            if not len(one.ids) == len(one.log_probs) == len(one.own):
                raise ValueError(
                    f"form {self._form} made an attempt with {len(one.ids)} ids, {len(one.log_probs)} log_probs and "
                    f"{len(one.own)} own; give each token all three, as Attempt.followed does"
                )
        drawn = [any(one.own) for one in attempts if one.counts and one.ids]
        if drawn and not any(drawn):
            raise ValueError(
                f"form {self._form} made no token that the policy drew, so nothing would be trained; check `own`"
            )
        return attempts

    def completions(self, attempts: Sequence[Attempt], *, scored: bool = False) -> Completions:
        """Attempts as a rollout, in the order of their prompts.

        Args:
            attempts: a prompt's attempts in the order in which they are reported.
            scored: whether the attempts are only scored, so that a prompt may have none, and all of them count.

        Raises:
            ValueError: an attempt has no tokens, not as many log-probs as tokens, or no room in the model, nothing is
                trained, or a prompt has no attempt that counts.
        """
        attempts = sorted(attempts if scored else self._sound(attempts), key=lambda one: one.prompt)
        for one in attempts:
            self._check_positions(one.prompt, len(one.context) + len(one.ids), 0)
        if empty := [one.prompt for one in attempts if not one.ids]:
            raise ValueError(f"a form made an attempt without tokens for prompt {empty[0]}; write at least one")
        have = {one.prompt for one in attempts if one.counts}
        if not scored and (lacking := [p for p in range(len(self.rows)) if p not in have]):
            raise ValueError(f"a form made no attempt that counts for prompt {lacking[0]}; make at least one")
        return Completions(
            [self.context(p) for p in range(len(self.rows))],
            Sampled([a.ids for a in attempts], [a.log_probs for a in attempts], [a.ended for a in attempts]),
            [self.text(one) for one in attempts],
            [one.prompt for one in attempts],
            contexts=[one.context for one in attempts],
            own=[one.own for one in attempts],
            counted=None if scored else [one.counts for one in attempts],
            told=[one.origin for one in attempts],
            drawn=not any(OF_GIVEN[0] in one.origin for one in attempts),
            keys=tuple(self.keys),
        )
