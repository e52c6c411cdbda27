"""Thoughts that are cut, and closed by words of the form, so that the policy has to answer there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ....core.addressing import address
from ....parts.needs import at_least, needs
from ....parts.ranges import Count, Several, Words
from ....parts.traits import in_evaluations
from .places import CLOSING, place_of

if TYPE_CHECKING:
    from ..writing import Attempt, Writer

PLACES = 9
"""The part of an address that says: this draws the places where thoughts are cut."""


def thoughts(attempt: Attempt, closing: list[int]) -> int:
    """Tokens before the closing words, or before the end token of a completion without them."""
    found = place_of(attempt.ids, closing)
    return len(attempt.ids) - attempt.ended if found is None else found


def closed(attempt: Attempt, place: int, words: list[int]) -> Attempt:
    """An attempt with closing words after its first `place` tokens, which are thoughts.

    The attempt stays as it is if it has the words there, or if only its end token is left.
    """
    rest = attempt.ids[place:]
    if rest[: len(words)] == words or (attempt.ended and len(rest) == 1):
        return attempt
    return attempt.cut(place).followed(words)


@needs(at_least("rollout.group", lambda recipe, choice: 2, "makes a completion and its exits a group"))
def exits(writer: Writer, *, closing: Words = CLOSING, answer: Count = 64, learned: bool = True) -> list[Attempt]:
    """One completion of a prompt, and answers at earlier places of its thoughts (S-GRPO, arXiv 2505.07686).

    The group of a prompt is one completion and `rollout.group` - 1 exits, which are cut at places drawn at random
    from its thoughts. Thoughts shorter than that have fewer exits.

    Args:
        writer: writes.
        closing: the words that end the thoughts. Thoughts also end where the policy writes them by itself.
        answer: most tokens of an answer.
        learned: whether the closing words are trained as if the policy had written them, so that it learns to exit.
    """
    words = writer.ids(closing)
    found: list[Attempt] = []
    limits: list[int] = []
    for path in writer.write(writer.starts(count=1)):
        generator = torch.Generator().manual_seed(address(writer.keys[path.prompt], PLACES))
        drawn = torch.randperm(max(thoughts(path, words) - 1, 0), generator=generator)
        places = sorted((drawn[: writer.group - 1] + 1).tolist())
        found += [replace(closed(path, place, words), origin={"exit": place}) for place in places]
        found.append(replace(path, origin={"exit": len(path.ids)}))
        limits += [place + len(words) + answer for place in places] + [len(path.ids)]
    done = writer.write(found, stage=1, limit=limits)
    return _learned(writer, done, len(words)) if learned else done


def _learned(writer: Writer, attempts: list[Attempt], count: int) -> list[Attempt]:
    """Attempts whose closing words belong to the policy, with its log-probs of them."""
    cut = [k for k, one in enumerate(attempts) if not all(one.own)]
    found = list(attempts)
    for k, values in zip(cut, writer.log_probs([attempts[k] for k in cut])):
        one, place = attempts[k], int(attempts[k].origin["exit"])
        log_probs = [*one.log_probs]
        log_probs[place : place + count] = values[place : place + count].tolist()
        found[k] = replace(one, log_probs=log_probs, own=[True] * len(one.ids))
    return found


@needs(
    at_least(
        "generation.max_tokens", lambda recipe, choice: choice["budgets"], "has {least} budgets",
        mend="use at most as many budgets as tokens",
    )
)  # fmt: skip
def anytime(
    writer: Writer, *, budgets: Several = 4, answers: Count = 2, closing: Words = CLOSING, answer: Count = 64
) -> list[Attempt]:
    """Thoughts that are cut at several budgets, and answered at each (AnytimeReasoner, arXiv 2505.13438).

    The budgets are equally far apart, up to generation.max_tokens. Each token of the thoughts is trained once, in the
    first answer of the first budget that has room for it. Thoughts that end before a budget have their last answers
    there too. The credit is `anytime`.

    Args:
        writer: writes.
        budgets: how many there are.
        answers: answers at each budget.
        closing: the words that end the thoughts, which are not trained. Thoughts also end where the policy writes them
            by itself, or at an end token.
        answer: most tokens of an answer.
    """
    words = writer.ids(closing)
    openings: list[Attempt] = []
    limits = [writer.max_tokens * (k + 1) // budgets for k in range(budgets)]
    for number, path in enumerate(writer.write(writer.starts())):
        end, before = thoughts(path, words), 0
        for k, limit in enumerate(limits):
            place = min(limit, end)
            opening = closed(path, place, words).cut(place + len(words))
            # The words of the form are no thoughts, and those that the policy wrote are.
            thought = sum(opening.own)
            origin = {"number": number % writer.group, "budget": k, "budgets": budgets, "thought": thought}
            opening = replace(opening, origin=origin)
            openings.append(opening.trained_from(before))
            openings += [opening.trained_from(thought)] * (0 if opening.ended else answers - 1)
            before = thought
            if place == end:
                break
    return writer.write(openings, stage=1, limit=[len(one.ids) + answer for one in openings])


@in_evaluations
def elastic(
    writer: Writer, *, thinking: Count | None = None, answer: Count | None = None, closing: Words = CLOSING
) -> list[Attempt]:
    """Thoughts and answer have separate budgets (Elastic Reasoning, arXiv 2505.05315).

    Thoughts that have not ended within their budget are cut and closed, and the answer follows. The closing words are
    not trained. Evaluations do the same.

    Args:
        writer: writes.
        thinking: most tokens of the thoughts; half of generation.max_tokens if left out.
        answer: most tokens of the answer; the other half if left out.
        closing: the words that end the thoughts. Thoughts also end where the policy writes them by itself.
    """
    words = writer.ids(closing)
    room = max(1, writer.max_tokens // 2) if thinking is None else thinking
    more = max(1, writer.max_tokens - room) if answer is None else answer
    openings: list[Attempt] = []
    limits: list[int] = []
    for one in writer.write(writer.starts(), limit=room + len(words)):
        place = min(thoughts(one, words), room)
        limits.append(place + len(words) + more)
        opening = closed(one, place, words)
        if opening is not one:
            opening = replace(opening, origin={"thoughts": "cut"})
        openings.append(opening.cut(limits[-1]))
    return writer.write(openings, stage=1, limit=limits)
