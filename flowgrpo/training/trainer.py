"""The one training loop: prompts → rollout → rewards → advantages → minibatches → update → average → evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..configs.schema import AnyRecipe, EmaConfig, Recipe
from ..configs.sections import PROMPT
from ..core.addressing import address
from ..core.diagnostics import COLUMNS
from ..pipelines.ema import Ema
from ..rewards.guards import Guards
from ..rewards.runner import RewardBatch, RewardSet
from .advantages import combined, node_advantages
from .ahead import Ahead
from .checkpoint import Stateful
from .clock import Clock
from .credit import kept_nodes
from .data import Data, PromptRow, templated
from .keeping import Keeper
from .launching import optimizer_of
from .memory import Memory
from .objectives import Objective
from .pooled import Pooled, pooled
from .processes import Processes, ended_together
from .readings import as_reported, readers, reading_record
from .records import joint_record, joint_update, reward_record, update_record
from .reporting import Reporter
from .rounds import RoundsObjective, collect_rounds, refuse_comparisons
from .run_folder import RunFolder
from .samples import Batch, asked, evaluated
from .stopping import Abandoned, Stop, Stopped
from .symptoms import Symptoms, marks
from .tasks import Collected, Task
from .text_replay import replay_successes
from .text_task import TextTask
from .text_visits import moved_since


class Trainer:
    """Trains a policy as a recipe says, into a run folder.

    Everything random is addressed by `(run seed, iteration, prompt)`, so results do not depend on interruption;
    whole groups live on one process, and loss normalisers are counts of the whole optimizer step, so processes and
    micro-batches simply add. Whatever compares beyond a group sees the samples of all processes.
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        task: Task,
        rewards: RewardSet,
        evaluation: RewardSet,
        data: Data,
        run: RunFolder,
        accelerator: Accelerator,
        reporter: Reporter,
        guards: Guards | None = None,
        stop: Stop | None = None,
    ) -> None:
        written = recipe
        recipe = as_reported(recipe, rewards.names)
        self.recipe, self.task = recipe, task
        self.rewards, self.evaluation, self.data = rewards, evaluation, data
        self.run, self.accelerator, self.reporter = run, accelerator, reporter
        self.guards, self.stop = guards or Guards([], []), stop or Stop()
        wanted: dict[str, EmaConfig | None] = {"ema": recipe.optimizer.ema}
        if isinstance(recipe, Recipe):
            wanted |= {"anchor": recipe.objective.anchor, "old": recipe.objective.old}
        self.averages = {name: _average(task, chosen) for name, chosen in wanted.items() if chosen}
        self.ema, self.old = self.averages.get("ema"), self.averages.get("old")
        if "anchor" in self.averages:
            task.compare_with(self.averages["anchor"].applied)
        self.clock = Clock(task.device, task.clock_parts)
        self.next_iteration = 0
        self.processes = Processes(accelerator.process_index, accelerator.num_processes, task.weights.meet)
        self.optimizer = optimizer_of(recipe, accelerator, task.weights, self.processes)
        self.keeper = Keeper(
            written, run, task.weights, self.parts, {"optimizer", *self.averages}, self.processes, accelerator,
            reporter, self.stop,
        )  # fmt: skip
        self.places = self.processes.share(recipe.rollout.prompts)
        self.cuts = self.processes.cuts(recipe.rollout.prompts, recipe.optimizer.updates)
        self.memory = Memory(recipe)
        make = partial(task.objective, self.old.applied if self.old else None)
        self.objective: Objective = make()
        self.symptoms = symptoms_of(recipe, rewards, len(data.heldout))
        self.in_rounds = recipe.rollout.budget is not None or bool(recipe.data.templates)
        if self.in_rounds:
            refuse_comparisons(rewards)
            self.objective = RoundsObjective(make)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds beside the weights, by file name."""
        guards = {"guards": self.guards} if self.guards.guards else {}
        return {"optimizer": self.optimizer, **self.averages, **self.task.parts(), **self.memory.parts(), **guards}

    # -- the loop ----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continue from the newest whole checkpoint; from the start if none was written yet.

        What the person who resumes should know is told first: damaged checkpoints, a changed recipe, lost metrics.

        Raises:
            ValueError: no checkpoint is whole, a process does not see it, or it does not fit the recipe.
        """
        with ended_together():
            self.next_iteration = self.keeper.resume()
            if self.accelerator.is_main_process:
                self.symptoms.replay(self.run.read_metrics())

    def train(self) -> None:
        """Run all remaining iterations; the run folder holds the results.

        Raises:
            Stopped: a signal has ended the run, which can go on from there.
        """
        with self.stop.deferred():
            with ended_together():
                stopped = self._train()
            if stopped or self.stop.number:
                raise Stopped(stopped or self.stop.number)

    def _train(self) -> int:
        """The number of the signal that has ended the run before its end, or 0."""
        self.keeper.tell_notes()
        self.reporter.started(self)
        self.clock.lap()
        stopped = 0
        while self.next_iteration < self.recipe.run.iterations:
            if stopped := self.keeper.pause(self.next_iteration):
                break
            before = self.keeper.moving()
            try:
                with self._abandonable(self.processes.count == 1):
                    done = self._turn(self.next_iteration)
            except Abandoned:
                stopped = self.keeper.agreed()
                self.keeper.write(self.next_iteration, before)
                break
            if not done:
                break
        else:
            stopped = self._finish()
        if not stopped:
            self._save_results()
        with ExitStack() as stack:
            for end in (self.accelerator.end_training, self.evaluation.close, self.rewards.close):
                stack.callback(end)
        return stopped

    def _turn(self, iteration: int) -> bool:
        """An iteration with its evaluation and what is written of it; False if a guard ends the run before it."""
        evaluated = self.evaluate(iteration) if iteration % self.recipe.evaluate.every == 0 else {}
        if self._stopped(iteration, evaluated):
            return False
        self.clock.lap()
        record = self.iterate(iteration)
        symptoms = self.symptoms.iteration(record)
        record |= evaluated | marks(symptoms)
        if self.accelerator.is_main_process:
            self.run.log(record)
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self.accelerator.log(numbers, step=iteration)
        # A run that ends because its terminal is gone has nobody to tell.
        with suppress(OSError) if self.stop.number else nullcontext():
            self.reporter.iteration(record)
            for symptom in symptoms:
                self.reporter.symptom(symptom)
        self.next_iteration = iteration + 1
        self.keeper.write_if_due(self.next_iteration)
        return True

    def _finish(self) -> int:
        """The evaluation of what was trained; the number of the signal that ended it, or 0."""
        total = self.recipe.run.iterations
        try:
            with self._abandonable(self.processes.count == 1):
                final = self.evaluate(total)
        except Abandoned:
            return self.stop.number
        self._stopped(total, final)
        if self.accelerator.is_main_process and final:
            self.run.log({"iteration": total, **final})
        return 0

    def _abandonable(self, possible: bool) -> AbstractContextManager[None]:
        """Until an optimizer step begins, a signal may end what is done in this context."""
        return self.stop.abandonable(self.task.weights.modules.values(), possible)

    def _stopped(self, iteration: int, evaluated: dict[str, float | None]) -> bool:
        """Tell the guards of an evaluation; whether one of them ends the run before its last iteration.

        The checkpoint of such an end holds what the guards knew before, for the evaluation is repeated on resuming.
        """
        before = copy.deepcopy(self.guards.state_dict())
        alarms = self.guards.observe(iteration, {name.removeprefix("eval/"): v for name, v in evaluated.items()})
        for alarm in alarms:
            self.reporter.alarm(alarm)
        evaluated |= {f"guard/{alarm.guard.reward}": 1.0 for alarm in alarms}
        stops = iteration < self.recipe.run.iterations and any(alarm.guard.action == "stop" for alarm in alarms)
        if stops:
            self.guards.load_state_dict(before)
            self.keeper.write(iteration)
            if self.accelerator.is_main_process:
                self.run.log({"iteration": iteration, **evaluated})
        return stops

    def iterate(self, iteration: int) -> dict[str, Any]:
        """One iteration: collect, score, advantage, update. Returns its metrics."""
        rows, experience, scores = self._sampled(iteration)
        everyone = self._pooled(rows, experience, scores)
        record = {"iteration": iteration, **reward_record(everyone)}
        record |= reading_record(everyone, self.recipe.advantage.uncertainty)
        advantages = self._advantages(everyone, scores, experience)
        keep = kept_nodes(experience, self.combined(scores, experience), self.recipe.advantage)
        with self.clock.part("reward"):
            record |= self.task.learn(experience, scores)
        self.memory.observe(everyone)
        record |= self.memory.record()
        record |= self.update(experience, advantages, keep)
        record |= self.task.settle(record)
        # A mean would round by the order of the nodes.
        largest = advantages.nan_to_num(0.0).abs().amax().item() if advantages.numel() else 0.0
        records, sizes, found = zip(*self.processes.gather((experience.record(), len(scores.values), largest)))
        record |= joint_record(records, sizes) | {"advantage/largest": max(found)}
        if iteration % self.recipe.run.sample_every == 0:
            batch = Batch(self.places, rows, experience, scores)
            batch.save("train", iteration, self.run, self.processes, self.accelerator)
        record |= {f"time/{part}": seconds for part, seconds in self.clock.lap().items()}
        return record

    def _sampled(self, iteration: int) -> tuple[list[PromptRow], Any, RewardBatch]:
        """`sample`, after which several processes give the iteration up if one of them has had a signal.

        Each may give up in between where none waits for it there.
        """
        if self.processes.count == 1:
            return self.sample(iteration)
        found = None
        alone = not self.in_rounds and self.task.weights.shards is None
        with suppress(Abandoned), self._abandonable(alone):
            found = self.sample(iteration)
        if self.keeper.agreed() or found is None:
            raise Abandoned
        return found

    def sample(self, iteration: int) -> tuple[list[PromptRow], Any, RewardBatch]:
        """This process's share of the iteration's prompts, sampled and scored, in rounds if the recipe wants them."""
        with Ahead(self.rewards, self.task.device) as ahead:
            return self._sample(iteration, ahead)

    def _sample(self, iteration: int, ahead: Ahead) -> tuple[list[PromptRow], Any, RewardBatch]:
        if not self.in_rounds:
            rows, experience = self.collect(iteration, ahead)
            with self.clock.part("reward"):
                scores = ahead.scores(*asked(rows, experience))
            if self.memory.successes is not None:
                experience, scores = replay_successes(self.memory.successes, rows, experience, scores)
            return rows, experience, scores
        rows, templates = self.rows(iteration), self.recipe.data.templates or [PROMPT]

        def sampled(prompts: Sequence[int], numbers: Sequence[int]) -> Any:
            keys = [self._key(iteration, p, number) for p, number in zip(prompts, numbers)]
            asked = [templated(rows[p], templates[n % len(templates)]) for p, n in zip(prompts, numbers)]
            begin = partial(_begin, ahead, [rows[p] for p in prompts])
            with self.old.applied() if self.old else nullcontext():
                # Rounds are one optimizer step.
                return self.task.rollout(asked, keys, iteration, self.clock, (), begin)

        def scored(part: Collected, prompts: Sequence[int]) -> RewardBatch:
            with self.clock.part("reward"):
                return ahead.scores(*asked([rows[p] for p in prompts], part))

        def pool(numbers: list[float]) -> tuple[list[float], list[int]]:
            return self.processes.pool(numbers, self.places)

        settings = self.recipe.rollout
        return rows, *collect_rounds(settings.budget, len(rows), len(templates), settings.group, sampled, scored, pool)

    def collect(self, iteration: int, ahead: Ahead | None = None) -> tuple[list[PromptRow], Any]:
        """One round of this process's share of the iteration's prompts, of whose scores `ahead` may begin some."""
        rows = self.rows(iteration)
        keys = [self._key(iteration, p, 0) for p in range(len(rows))]
        begin = None if ahead is None else partial(_begin, ahead, rows)
        with self.old.applied() if self.old else nullcontext():
            return rows, self.task.rollout(rows, keys, iteration, self.clock, self.cuts, begin)

    def rows(self, iteration: int) -> list[PromptRow]:
        """This process's share of the prompts of an iteration, in the order of the stream or by the curriculum."""
        count = self.recipe.rollout.prompts
        if self.memory.curriculum is None:
            everything = self.data.train.take(iteration * count, count)
        else:
            everything = self.memory.draw(self.data.train.rows, iteration, count)
        return [everything[place] for place in self.places]

    def _key(self, iteration: int, prompt: int, round_number: int) -> int:
        """What addresses the randomness of a round of one of this process's prompts."""
        seed, number = self.recipe.run.seed, iteration * self.recipe.rollout.prompts + self.places[prompt]
        return address(seed, 1, number) if round_number == 0 else address(seed, 8, number, round_number)

    def score(self, rewards: RewardSet, rows: list[PromptRow], experience: Collected) -> RewardBatch:
        """Rewards of all leaves, whole groups at a time."""
        return rewards.score(*asked(rows, experience))

    def combined(self, scores: RewardBatch, experience: Collected) -> RewardBatch:
        """The rewards as the recipe combines them."""
        return combined(self.recipe, scores, experience)

    def advantages(self, scores: RewardBatch, experience: Collected, rows: Sequence[PromptRow]) -> Tensor:
        """[N] advantages of the nodes; a step has that of the node it leads to.

        All processes must call it. Estimators that remember prompts learn from the rollout: for them, call it once an
        iteration.
        """
        return self._advantages(self._pooled(rows, experience, scores), scores, experience)

    def _advantages(self, everyone: Pooled, scores: RewardBatch, experience: Collected) -> Tensor:
        model = self.task.credit_model()
        return node_advantages(self.recipe, self.memory, everyone, scores, experience, model).to(self.task.device)

    def _pooled(self, rows: Sequence[PromptRow], experience: Collected, scores: RewardBatch) -> Pooled:
        settings, moved = self.recipe.advantage, None
        if self.memory.visits is not None:
            assert isinstance(self.task, TextTask)
            with self.clock.part(self.task.update_part):
                moved = moved_since(
                    self.memory.visits, self.task.policy, rows, experience, self.processes, self.places
                )  # fmt: skip
        return pooled(
            self.processes, self.places, rows, experience, scores, settings.stratum, settings.shaping,
            readers(self.recipe), moved,
        )  # fmt: skip

    # -- the update --------------------------------------------------------------------------------------------

    def update(self, experience: Collected, advantages: Tensor, keep: Tensor | None = None) -> dict[str, Any]:
        """All optimizer steps of one rollout. `advantages` [N] and `keep` [N] (what is trained) are by node."""
        statistics = torch.zeros(experience.columns, 2, COLUMNS, dtype=torch.float64)
        sums: dict[str, Tensor] = {}
        first_error = torch.zeros(())
        norms = []
        settings, objective = self.recipe.optimizer, self.objective
        with self.clock.part(self.task.update_part):
            objective.prepare(experience)
        for step in range(settings.epochs * settings.updates):
            part = step % settings.updates
            rows = torch.tensor(float(objective.rows(experience, part, keep)), device=self.task.device)
            rows = self.processes.add(rows).clamp(min=1.0)
            with self.clock.part(self.task.update_part):
                self._settle(experience, part, advantages, keep)
            for batch in objective.batches(experience, part, keep):
                with self.clock.part(self.task.update_part):
                    outcome = objective.backward(experience, batch, advantages, keep, rows)
                statistics += outcome.statistics
                sums = {name: sums.get(name, 0) + value for name, value in outcome.metrics.items()}
                if step == 0:
                    first_error = torch.maximum(first_error, outcome.error)
            with self.clock.part("optimizer"):
                norms.append(self._step())
        mine = statistics, {name: value.cpu() for name, value in sums.items()}, first_error
        return update_record(*joint_update(self.processes.gather(mine)), norms)

    def _settle(self, experience: Collected, part: int, advantages: Tensor, keep: Tensor | None) -> None:
        """Let the objective know what the step needs to know of the batches of all processes."""
        sums = self.objective.measure(experience, part, advantages, keep)
        if sums is not None:
            self.objective.settle(self.processes.add(sums))

    def _step(self) -> Tensor:
        self.stop.settled()
        norm = self.optimizer.step()
        for average in self.averages.values():
            average.step()
        return norm

    # -- records -----------------------------------------------------------------------------------------------

    def evaluate(self, iteration: int) -> dict[str, float | None]:
        """Sample every held-out prompt with fixed seeds, with the averaged weights."""
        if not self.data.heldout:
            return {}
        batch, record = evaluated(
            self.task, self.data.heldout, self.evaluation, self.ema, self.processes, self.clock
        )  # fmt: skip
        batch.save("eval", iteration, self.run, self.processes, self.accelerator)
        self.reporter.evaluation(iteration, {name: v for name, v in record.items() if name.startswith("eval/")})
        symptoms = self.symptoms.evaluation(record)
        for symptom in symptoms:
            self.reporter.symptom(symptom)
        return record | marks(symptoms)

    def _save_results(self) -> None:
        weights = self.task.weights
        if self.accelerator.is_main_process or weights.shards is not None:
            with self.ema.applied() if self.ema else nullcontext(), weights.in_one_place():
                if self.accelerator.is_main_process:
                    weights.save(self.run.path / self.task.result, overwrite=True)
        self.accelerator.wait_for_everyone()


def symptoms_of(recipe: AnyRecipe, rewards: RewardSet, prompts: int) -> Symptoms:
    """What looks at the metrics of a recipe's run."""
    named = zip(recipe.rewards, rewards.names, rewards.weights.tolist())
    return Symptoms({name: weight if own.at_least is None else 1.0 for own, name, weight in named}, prompts)


def _begin(ahead: Ahead, rows: Sequence[PromptRow], chunk: Collected) -> None:
    ahead.begin(*asked(rows, chunk))


def _average(task: Task, settings: EmaConfig) -> Ema:
    return Ema(task.weights, decay=settings.decay, every=settings.every, rise=settings.rise)
