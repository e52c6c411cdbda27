"""A masked language model as a policy: it rolls out a plan of unmasking, and scores tokens again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...configs.schema import MaskedRecipe
from ...pipelines.experience import Experience, part_bounds
from ...pipelines.policy import Told, silent
from ...samplers.plans import Plan
from ...samplers.rollout import RolloutRunner
from ...samplers.transitions import Rollout, Transitions, Velocity, given_rollout, replay
from ...samplers.unmasking import MaskMoves, part, reveal_log_probs, with_part, without_mask
from ...text.broken import refuse_nan
from ...text.finished_blocks import FinishedBlocks
from ...text.masked_model import Frame, MaskedLanguageModel
from ...text.model import LanguageWeights
from ..prompts.room import check_room

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class UnmaskedTexts(Experience):
    """A finished rollout whose samples are L texts.

    Attributes:
        decode: the text of a row of token ids, masks among them.
        frames: the token ids around a completion of each of P prompts.
    """

    decode: Callable[[Sequence[int]], str] = str
    frames: tuple[Frame, ...] = ()

    def described(self) -> list[str]:
        """[L] how each text was made, in words: the tokens and the steps that were taken."""
        revealed, parent, node = self._revealed, self.rollout.parent, self.rollout.leaf
        tokens, steps = torch.zeros_like(node), torch.zeros_like(node)
        # All leaves go up at once; a root has revealed nothing, and stays where it is.
        while bool((parent[node] >= 0).any()):
            tokens, steps = tokens + revealed[node], steps + (revealed[node] > 0)
            node = torch.where(parent[node] >= 0, parent[node], node)
        return [
            f"{count} tokens in {taken} step{'s' if taken > 1 else ''}"
            for count, taken in zip(tokens.tolist(), steps.tolist())
        ]

    def origins(self) -> list[dict[str, Any]]:
        """For each of L texts: `path`, as for images, and `steps`, the text after each step that revealed something."""
        parents, states = self.rollout.parent.tolist(), self.rollout.states
        assert states is not None
        revealed = self._revealed.tolist()
        shown: dict[int, str] = {}
        found = []
        for node, origin in zip(self.rollout.leaf.tolist(), super().origins()):
            steps: list[str] = []
            while (parent := parents[node]) >= 0:
                if node not in shown:
                    shown[node] = self.decode(states[node].tolist())
                if revealed[node]:
                    steps.append(shown[node])
                node = parent
            found.append({"path": origin["path"], "steps": steps[::-1]})
        return found

    @property
    def _revealed(self) -> Tensor:
        """[N] how many tokens the step to each node revealed, in host memory; 0 for a root."""
        states = self.rollout.states
        assert states is not None
        before = states[self.rollout.parent.clamp(min=0).to(states.device)]
        changed = (states != before).sum(1).cpu()
        return changed.masked_fill(self.rollout.parent < 0, 0)


@dataclass(frozen=True)
class RevealedTokens:
    """The tokens that E edges reveal, under the current policy.

    Attributes:
        log_probs: [E, L] with gradients; 0 where nothing is revealed.
        old: [E, L] log-probs under the policy that sampled.
        mask: [E, L] bool: what is revealed.
        node: [E] the node to which each edge leads.
        step: the step of unmasking.
    """

    log_probs: Tensor
    old: Tensor
    mask: Tensor
    node: Tensor
    step: int


class MaskedPolicy:
    """A masked language model that samples and scores.

    Args:
        language: the model.
        weights: its trained weights.
        recipe: length, temperature, order and batch.

    Attributes:
        reference: a context in which the model is the reference of the penalties.
    """

    def __init__(self, language: MaskedLanguageModel, weights: LanguageWeights, recipe: MaskedRecipe) -> None:
        self.language, self.weights, self.recipe = language, weights, recipe
        self.device = next(language.model.parameters()).device
        self.reference: Callable[[], AbstractContextManager[None]] = weights.reference
        order = recipe.sampler.order.make()
        ends = language.ends if recipe.generation.stop_at_end else ()
        self.moves = MaskMoves(recipe.generation.tokens, language.mask, order, self.device, language.block, ends)
        self._frames: dict[tuple[str, str], Frame] = {}

    def frame(self, prompt: str, messages: Messages | None = None) -> Frame:
        """The token ids around a completion of a prompt; each prompt is encoded once.

        Args:
            prompt: the text of the prompt.
            messages: the conversation whose last message is the prompt, if it is one.

        Raises:
            ValueError: the prompt and the completion are longer than the model takes.
        """
        # Conversations may end with the same message.
        known = (prompt, json.dumps(messages))
        if known not in self._frames:
            frame = self.language.encode(prompt, messages)
            if self.language.positions is not None:
                given, tokens = sum(map(len, frame)), self.recipe.generation.tokens
                check_room(self.language.positions, prompt, given, tokens, "generation.tokens")
            self._frames[known] = frame
        return self._frames[known]

    def logits_of(self, frames: Sequence[Frame], *, cached: bool = False) -> Velocity:
        """Logits as a function of states, step, and the row of each state's prompt, for the executor.

        A state with nothing left to reveal is not evaluated, and has logits of 0. The first call has a state that is.

        Args:
            frames: P prompts, see `frame`.
            cached: whether keys and values of finished blocks are kept, as long as the function is.
        """
        logits = FinishedBlocks(self.language).logits if cached else self.language.logits
        like = torch.zeros(0)

        def evaluated(x: Tensor, i: int, rows: Sequence[int]) -> Tensor:
            nonlocal like
            going = self.moves.going(x).nonzero().flatten()
            if len(going) == 0:
                return like.new_zeros(len(x), *like.shape[1:])
            of_states = [frames[rows[row]] for row in going.tolist()]
            found = logits(of_states, x[going] if len(going) < len(x) else x)
            like = found.new_empty(0, *found.shape[1:])
            return (
                found if len(found) == len(x) else like.new_zeros(len(x), *like.shape[1:]).index_copy(0, going, found)
            )

        return evaluated

    def sample(
        self,
        frames: Sequence[Frame],
        keys: Sequence[int],
        plan: Plan,
        cuts: Sequence[int] = (),
        chunk: slice | None = None,
        told: Told = silent,
        seeds: Sequence[int] | None = None,
    ) -> Rollout:
        """Roll out one tree for each prompt.

        Args:
            frames: P prompts, see `frame`.
            keys: P numbers that address the randomness of each prompt.
            plan: what each step does.
            cuts: the first prompt of each part after the first.
            chunk: the prompts that are rolled out; by default all.
            told: called with the number of evaluated states, and with the number in a rollout of all prompts.
            seeds: a seed for each root of the chunk, in place of the keys of the prompts.
        """
        chosen, each = chunk or slice(0, len(keys)), plan.counts().evaluations
        logits, done = self.logits_of(frames, cached=self.recipe.rollout.cache), chosen.start * each

        def counted(x: Tensor, i: int, rows: Sequence[int]) -> Tensor:
            nonlocal done
            found = logits(x, i, rows)
            refuse_nan(found)
            done += len(x)
            told(done, len(frames) * each)
            return found

        runner = RolloutRunner(
            counted, plan, batch=self.recipe.rollout.batch, moves=self.moves,
            cuts=part_bounds(len(frames), len(cuts) + 1, cuts)[1:-1],
        )  # fmt: skip
        rollout = runner.run(keys[chosen], chosen.start, seeds)
        assert rollout.states is not None
        inner = rollout.parent[rollout.parent >= 0].unique()
        return replace(rollout, evaluations=int(self.moves.going(rollout.states[inner.to(self.device)]).sum()))

    def given(self, answers: Sequence[str], plan: Plan, chunk: slice) -> Rollout:
        """Given completions as a rollout without steps. End tokens fill them behind their end, as the model writes it.

        With `generation.stop_at_end` nothing is written there, so masks fill them.

        Args:
            answers: texts, as many for each prompt of the chunk as the plan has roots.
            plan: whose samples are given.
            chunk: the range of prompts.

        Raises:
            ValueError: a text has more tokens than a completion.
        """
        length, language, rows = self.recipe.generation.tokens, self.language, []
        fill = language.mask if self.recipe.generation.stop_at_end else language.fill
        for text in answers:
            ids = language.answer_tokens(text)
            if len(ids) > length:
                raise ValueError(f"the completion {text!r:.80} has {len(ids)} tokens; generation.tokens is {length}")
            rows.append([*ids, *[fill] * (length - len(ids))])
        owners = [p for p in range(chunk.start, chunk.stop) for _ in range(plan.roots)]
        x = torch.tensor(rows, device=self.device)
        return replace(given_rollout(owners, plan.roots, plan.num_steps, x), states=x)

    def decode(self, rollout: Rollout) -> list[str]:
        """The texts of the leaves."""
        return [self.language.decode(ids) for ids in rollout.x.tolist()]

    def score(self, experience: UnmaskedTexts, transitions: Transitions, batch: slice) -> RevealedTokens:
        """Evaluate one recorded batch of states again. Until the weights move, the log-probs are the recorded ones."""
        replayed = replay(self.logits_of(experience.frames), transitions, batch)
        before = transitions.x[batch][replayed.rows()]
        after, old = transitions.x_next[replayed.edges], transitions.token_log_prob
        assert old is not None
        mask = (before == self.moves.mask) & (after != self.moves.mask)
        logits, places = without_mask(replayed.velocity, self.moves.mask)[replayed.rows()], self.moves.places(before)
        revealed = part(after, places), part(mask, places)
        by_token = reveal_log_probs(logits, *revealed, transitions.coefficients.std)
        found = with_part(by_token.new_zeros(mask.shape), places, by_token)
        node = transitions.node[replayed.edges]
        return RevealedTokens(found, old[replayed.edges], mask, node, transitions.step)

    def token_log_probs(self, frames: Sequence[Frame], ids: Tensor, masked: Tensor, scored: Tensor) -> Tensor:
        """[N, L] log-probs of some tokens of N completions, and 0 elsewhere, with gradients.

        Args:
            frames: N prompts.
            ids: [N, L] the completions; they may have masks that were never revealed.
            masked: [N, L] bool: what the model does not see.
            scored: [N, L] bool: the masked tokens that have a log-prob. Only they have logits.
        """
        size, width, block = max(int(scored.sum(1).max()), 1), ids.shape[1], self.language.block
        if block is not None and bool(scored.any()):
            # No scored token sees what follows the last block of them.
            width = (int(scored.any(0).nonzero().max()) // block + 1) * block
        places = scored.int().argsort(dim=1, descending=True, stable=True)[:, :size]
        x = torch.where(masked, self.moves.mask, ids)
        logits = self.language.scored_logits(frames, x[:, :width], ids[:, :width], places)
        found = reveal_log_probs(
            without_mask(logits, self.moves.mask), part(ids, places), part(scored, places),
            self.recipe.generation.temperature,
        )  # fmt: skip
        return with_part(found.new_zeros(ids.shape), places, found)
