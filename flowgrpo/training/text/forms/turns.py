"""Completions in turns: the policy writes a call, a tool answers within the completion, and the policy goes on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from ....parts.choice import Choice, Of
from ....parts.needs import needs
from ....parts.ranges import Count
from ....parts.traits import in_evaluations
from .filling import holds
from .tools import calculator

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...data import PromptRow
    from ..writing import Attempt, Writer

Tool = Annotated[Callable[..., str], Of("tool", "calculator")]


@dataclass(frozen=True)
class Talk:
    """How a policy talks with a tool.

    Attributes:
        tool: from the text of a call and its prompt to the answer.
        begin: what begins a call; with an empty text, a call begins where a turn begins.
        end: what ends a call.
        answer: the answer with `{answer}`, as the completion has it.
        calls: the most calls of a completion that are answered.
    """

    tool: Callable[[str, PromptRow], str]
    begin: str
    end: str
    answer: str
    calls: int

    def call(self, text: str) -> str | None:
        """The first call in the text of a turn; None if it has no whole call."""
        rest = text.partition(self.begin)[2] if self.begin else text
        call, found, _ = rest.partition(self.end)
        return call if found else None

    def answered(self, writer: Writer, attempt: Attempt, first: int) -> Attempt | None:
        """An attempt up to the first call of the turn that begins at token `first`, with the answer of the tool.

        None if there is no call, no further call is answered, or no token could follow the answer.
        """
        decode, count = writer.policy.language.decode, attempt.origin.get("calls", 0)
        ids = attempt.ids[first:]
        call = self.call(decode(ids))
        if call is None or count >= self.calls:
            return None
        # The call ends with the first token with which the text has a whole call.
        length = bisect_left(range(len(ids)), True, key=lambda k: self.call(decode(ids[:k])) is not None)
        told = self.tool(call, writer.rows[attempt.prompt])
        if not isinstance(told, str):
            raise ValueError(f"the tool of rollout.form answered {told!r:.80} to the call {call!r:.80}; return a text")
        found = attempt.cut(first + length).followed(writer.ids(self.answer.replace("{answer}", told)))
        found = replace(found, origin={**attempt.origin, "calls": count + 1})
        return found if len(found.ids) < writer.max_tokens else None


def _ends(recipe: Any, choice: Choice) -> list[str]:
    """Faults of a recipe: nothing ends a call, so no call would ever be answered."""
    return [] if choice["end"] else [f"form {choice.short}: end is empty; write the text that ends a call"]


@in_evaluations
@needs(_ends, holds("answer", "answer"))
def turns(
    writer: Writer,
    *,
    tool: Tool = calculator,
    begin: str = "<tool>",
    end: str = "</tool>",
    answer: str = "<result>{answer}</result>",
    calls: Count = 4,
) -> list[Attempt]:
    """A completion may call a tool. The tool's answer joins the completion, is not trained, and the policy goes on.

    The rewards get the whole completion, with calls and answers. `generation.max_tokens` counts the answers too; a call
    whose answer has no room is not answered. Evaluations have the same turns.

    Options:
        tool: answers the calls.
        begin: text that begins a call; if it is empty, a call begins where a turn begins.
        end: text that ends a call.
        answer: the tool's answer within the completion; holds `{answer}`.
        calls: the most calls of a completion that are answered.
    """
    return in_turns(writer, writer.starts(), Talk(tool, begin, end, answer, calls))


@in_evaluations
@needs(_ends, holds("answer", "answer"))
def branches(
    writer: Writer,
    *,
    tool: Tool = calculator,
    begin: str = "<tool>",
    end: str = "</tool>",
    answer: str = "<result>{answer}</result>",
    calls: Count = 4,
    first: Count = 4,
    tokens: Count = 10,
    rise: float = 0.0,
    width: Count = 1,
) -> list[Attempt]:
    """As `turns`, but only some completions begin anew: the others branch off where a tool's answer makes unsure.

    The mean of -log p of the first tokens estimates the entropy of a turn. Where the entropy after an answer is above
    the entropy of the first turn, further completions go on from this answer, as long as the group has places. Places
    that are left at the end get whole completions. A group is as large as without branches, and evaluations do not
    branch.

    This is the rollout of ARPO (arXiv 2507.19849). With an advantage of whole completions, shared tokens get the mean
    of the advantages of their branches, which is the paper's soft estimate.

    Options:
        tool: answers the calls.
        begin: text that begins a call; if it is empty, a call begins where a turn begins.
        end: text that ends a call.
        answer: the tool's answer within the completion; holds `{answer}`.
        calls: the most calls of a completion that are answered.
        first: completions of a prompt that begin anew; at most the group.
        tokens: tokens of a turn over which the mean is taken.
        rise: a turn branches if its entropy is above the entropy of the first turn by more than this, in nats.
        width: completions that branch off at a place.
    """
    talk = Talk(tool, begin, end, answer, calls)
    if writer.iteration is None:
        return in_turns(writer, writer.starts(), talk)
    found = writer.starts(count=min(first, writer.group))
    places = dict.fromkeys(range(len(writer.rows)), max(writer.group - first, 0))
    roots, going, turn = dict[int, float](), list(range(len(found))), 0
    while going:
        begun = {k: len(found[k].ids) for k in going}
        _written(writer, found, going, stage=2 * turn)
        for k in going:
            unsure = entropy(found[k].log_probs[begun[k] :][:tokens])
            if unsure <= roots.setdefault(k, unsure) + rise or turn == 0:
                continue
            prompt, stem = found[k].prompt, found[k].cut(begun[k])
            count = min(width, places[prompt])
            places[prompt] -= count
            for _ in range(count):
                roots[len(found)], begun[len(found)] = roots[k], begun[k]
                found.append(replace(stem, origin={**stem.origin, "branched": begun[k]}))
        _written(writer, found, [k for k in begun if k not in going], stage=2 * turn + 1)
        going = [k for k, start in begun.items() if _goes_on(writer, found, k, start, talk)]
        turn += 1
    rest = [start for start in writer.starts(count=1) for _ in range(places[start.prompt])]
    return found + in_turns(writer, rest, talk, 2 * turn)


def entropy(log_probs: Sequence[float]) -> float:
    """The mean of -log p of some drawn tokens, an estimate of their entropy in nats; 0 without tokens."""
    return -sum(log_probs) / max(len(log_probs), 1)


def in_turns(writer: Writer, starts: Sequence[Attempt], talk: Talk, stage: int = 0) -> list[Attempt]:
    """Attempts with the answers of a tool; `stage` is the first of as many stages as there are turns."""
    found, going = list(starts), list(range(len(starts)))
    while going:
        begun = [len(found[k].ids) for k in going]
        _written(writer, found, going, stage)
        going = [k for k, first in zip(going, begun) if _goes_on(writer, found, k, first, talk)]
        stage += 1
    return found


def _written(writer: Writer, found: list[Attempt], rows: Sequence[int], stage: int) -> None:
    """Continue some of the attempts, in their places."""
    for k, one in zip(rows, writer.write([found[k] for k in rows], stage=stage)):
        found[k] = one


def _goes_on(writer: Writer, found: list[Attempt], k: int, first: int, talk: Talk) -> bool:
    """Whether a tool has answered an attempt, which is then in its place with the answer."""
    told = talk.answered(writer, found[k], first)
    if told is not None:
        found[k] = told
    return told is not None
