"""The training loop: prompts → samples → rewards → advantages → minibatches → update → average → evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from ..configs.coefficient_schedules import recipe_at, values_at
from ..configs.schema import AnyRecipe
from ..rewards.base import RewardError
from ..rewards.runner import RewardBatch, RewardSet
from .collecting import Collector
from .credit.combining import total_reward
from .credit.from_scores import Credit
from .credit.pooling import Batch, Pooled, asked, pooled
from .data import Data, PromptRow
from .device_memory import lacks_memory
from .distributed.context_groups import context_of
from .distributed.failures import FailedTogether
from .distributed.launching import optimizer_of
from .distributed.processes import Processes, ended_together
from .evaluating import Evaluations
from .extensions.extension import Extensions
from .folder.best import BestWeights
from .folder.checkpoint import Stateful
from .folder.keeping import Keeper
from .folder.model_card import former_card
from .folder.run_folder import RunFolder
from .folder.saved_samples import save_samples
from .joined_rollouts import JoinedObjective
from .losses.objective import Objective
from .memory_advice import memory_explained
from .reported import as_reported
from .reporting.clock import Clock
from .reporting.own_metrics import own_metrics
from .reporting.records import batch_record, reward_record
from .reporting.reporter import Reporter
from .reporting.symptoms import marks, symptoms_of
from .reporting.tracking import Trackers
from .result_card import Known, write_result_card
from .stopping import Abandoned, Stop, Stopped
from .tasks import Collected, Task
from .together import together
from .updating import Updater, averages_of


class Trainer:
    """Trains a policy as a recipe says, into a run folder.

    All randomness is addressed by `(run seed, iteration, prompt)`, so an interruption does not change results. A group
    is always on one process. Comparisons beyond a group see the samples of all processes.
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
        trackers: Trackers,
        reporter: Reporter,
        extensions: Extensions | None = None,
        stop: Stop | None = None,
    ) -> None:
        written, recipe = recipe, as_reported(recipe, rewards.names)
        self.recipe, self.task, self.rewards, self.evaluation, self.data = recipe, task, rewards, evaluation, data
        self.run, self.accelerator, self.trackers, self.reporter = run, accelerator, trackers, reporter
        trackers.note = reporter.note
        self.extensions, self.stop = extensions or Extensions(), stop or Stop()
        self.averages = averages_of(recipe, task)
        self.ema = self.averages.get("ema")
        # Without an average of its own, a policy that lags is the average that is saved.
        lags = task.followers().get("old") is not None
        self.lagging = lagging = self.averages.get("old", self.ema) if lags else None
        if "anchor" in self.averages:
            task.compare_with(self.averages["anchor"].applied)
        task.score_with(self._judged)
        task.differentiate(rewards, data.train.rows)
        self.clock, self.next_iteration = Clock(task.device, task.clock_parts), 0
        self.processes = Processes(
            accelerator.process_index, accelerator.num_processes, task.weights.meet, context_of(recipe)
        )
        self.optimizer = optimizer_of(recipe, accelerator, task.weights, self.processes)
        self.credit = Credit(recipe)
        self.extensions.begin(task, self.processes, self.clock)
        self.keeper = Keeper(
            written, run, task.weights, self.parts, {"optimizer", *self.averages}, self.processes, accelerator,
            trackers, reporter, self.stop,
        )  # fmt: skip
        self.symptoms = symptoms_of(recipe, rewards.names, len(data.heldout))
        self.collector = Collector(recipe, task, rewards, data, self.extensions, self.processes, self.clock, lagging)
        compared = self.averages.get("compared", lagging)
        self._compared_with = compared.applied if compared else None
        self.objective = self._follow(0)
        self.updater = Updater(
            recipe.optimizer, task, self.objective, self.optimizer, self.averages.values(), self.processes, self.clock,
            self.stop,
        )  # fmt: skip
        self.evaluations = Evaluations(
            recipe.evaluate, recipe.run.iterations, task, data.heldout, evaluation, self.ema, self.clock, self.symptoms,
            self.extensions, self.keeper,
        )  # fmt: skip
        self.best: BestWeights | None = None
        if recipe.evaluate.results == "best" and data.heldout:
            lower = (recipe.evaluate.rewards or recipe.rewards)[0].weight < 0
            self.best = BestWeights(recipe.evaluate, evaluation.names[0], self.keeper, lower)

    def _follow(self, iteration: int) -> Objective:
        """Give coefficients with a schedule the values of an iteration; returns the loss with these values."""
        recipe = recipe_at(self.recipe, iteration)
        if recipe.schedules:
            self.rewards.weigh([reward.weight for reward in recipe.rewards])
            self.task.controls.follow(recipe.objective.get("entropy"))
        make = partial(self.task.objective, recipe, self._compared_with)
        return JoinedObjective(lambda _: make()) if self.collector.uneven else make()

    @property
    def shared_out(self) -> str:
        """What the processes share out, in words; "" if each process holds everything."""
        weights, context = self.task.weights, context_of(self.recipe)
        shared = self.optimizer.shared_out
        if weights.shards is not None:
            shared = f"{'full' if weights.kind == 'full' else 'frozen'} weights in shards by FSDP2"
        split = "" if context == 1 else f"the tokens of each sample on {context} of them"
        return ", ".join(filter(None, (shared, split)))

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds besides the weights, by file name."""
        remembered = {**self.task.parts(), **self.credit.parts(), **self.extensions.parts()}
        return {"optimizer": self.optimizer, **self.averages, **remembered}

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, or from the start if no checkpoint was written yet.

        Notes on damaged checkpoints, a changed recipe and lost metrics are reported first.

        Raises:
            ValueError: no checkpoint is whole, a process does not see the checkpoint, or it does not fit the recipe.
        """
        with ended_together():
            self.next_iteration = self.keeper.resume()
            if self.accelerator.is_main_process:
                self.symptoms.replay(self.run.read_metrics(), self.keeper.alike_since)
            if self.best is not None:
                self.best.resume()

    def train(self) -> None:
        """Run all remaining iterations, and write the results into the run folder.

        Raises:
            Stopped: a signal has ended the run. The run can be resumed.
            OutOfMemory: a device has too little memory. The run can be resumed with smaller batches.
        """
        with self.stop.deferred():
            with ended_together(), memory_explained(self.recipe, self.run.path, self.processes.count):
                stopped = self._train()
            if stopped or self.stop.number:
                raise Stopped(stopped or self.stop.number)

    def _train(self) -> int:
        """Run; returns the number of the signal that ended the run early, or 0."""
        self.keeper.tell_notes()
        self.trackers.start(self.next_iteration)
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
            except RuntimeError as error:
                if not isinstance(error, RewardError) and not lacks_memory(error):
                    raise
                # After an error that no other process knows of, they may be in the middle of a step.
                known = self.processes.count == 1 or isinstance(error, FailedTogether)
                if known and not self.stop.moved:
                    self.keeper.write(self.next_iteration, before)
                raise
            if not done:
                break
        else:
            stopped = self._finish()
        if not stopped:
            self._save_results()
        with ExitStack() as stack:
            for end in (self.accelerator.end_training, self.trackers.end, self.evaluation.close, self.rewards.close):
                stack.callback(end)
        return stopped

    def _save_results(self) -> None:
        """Write the trained weights, or the weights of the best evaluation, with their model card."""
        name, done = self.task.result, self.next_iteration
        folder, former = self.run.path / name, None
        if self.accelerator.is_main_process:
            former = former_card(folder)
        if self.best is not None and self.best.become_results(name, done):
            assert self.best.mark is not None
            done = self.best.mark.iteration
        else:
            self.keeper.save_results(name, self.ema)
        if self.accelerator.is_main_process:
            known = Known(self.data.train.rows, self.data.heldout, self.task.weights.pipe)
            write_result_card(folder, name, self.recipe, self.run, done, known, former)

    def _turn(self, iteration: int) -> bool:
        """Do an iteration with its evaluation, and write its results; False if a guard ends the run before it."""
        evaluated = self._evaluated(iteration)
        if self.evaluations.ends(iteration, evaluated):
            return False
        self.clock.lap()
        record = self.iterate(iteration)
        symptoms = self.symptoms.iteration(record)
        record |= evaluated | marks(symptoms)
        self.keeper.log(record)
        # If the run ends because its terminal is gone, nobody reads these lines.
        with suppress(OSError) if self.stop.number else nullcontext():
            self.reporter.iteration(record)
            for symptom in symptoms:
                self.reporter.symptom(symptom)
        self.next_iteration = iteration + 1
        self.keeper.write_if_due(self.next_iteration)
        return True

    def _finish(self) -> int:
        """Make the last evaluation; returns the number of the signal that ended it early, or 0."""
        total = self.recipe.run.iterations
        try:
            with self._abandonable(self.processes.count == 1):
                final = self._evaluated(total)
        except Abandoned:
            return self.keeper.agreed()
        self.evaluations.ends(total, final)
        if final:
            self.keeper.log({"iteration": total, **final})
        return 0

    def _evaluated(self, iteration: int) -> dict[str, float | None]:
        """The metrics of the evaluation that is due before an iteration; its weights are kept if they are the best."""
        record = self.evaluations.make(iteration)
        if self.best is not None:
            self.best.evaluated(iteration, record, self.ema)
        return record

    def _abandonable(self, possible: bool) -> AbstractContextManager[None]:
        """A context that a signal may end, until an optimizer step begins."""
        return self.stop.abandonable(self.task.weights.modules.values(), possible)

    def iterate(self, iteration: int) -> dict[str, Any]:
        """One iteration: sample, score, compare, update. Returns its metrics."""
        if self.recipe.schedules:
            self.objective = self.updater.objective = self._follow(iteration)
        batch, everyone, advantages = self._compared(self._sampled(iteration))
        keep = self.credit.kept(batch)
        moved = {f"schedule/{key}": value for key, value in values_at(self.recipe, iteration).items()}
        record = {"iteration": iteration, **reward_record(everyone), **moved}
        with self.clock.part("reward"):
            # A critic learns the rewards that advantages are computed from.
            scores = batch.scores if self.task.credit_model() is None else self.credit.combined(batch)
            record |= self.task.learn(batch.experience, scores)
        record |= own_metrics("the advantage", self.credit.record(), record)
        record |= self.update(batch.experience, advantages, keep)
        record |= self.task.settle(record)
        record |= batch_record(self.processes, batch, advantages)
        record |= self.extensions.update_done(everyone, record)
        if self.recipe.run.saves_samples(iteration):
            save_samples(batch, "train", iteration, self.run, self.processes, self.trackers)
        record |= {f"time/{part}": seconds for part, seconds in self.clock.lap().items()}
        return record

    def _sampled(self, iteration: int) -> Batch:
        """This process's share of an iteration, sampled and scored. Uneven groups are sampled together, in rounds."""
        return together(self.keeper, partial(self.collector.sample, iteration), alone=not self.collector.uneven)

    def _compared(self, batch: Batch) -> tuple[Batch, Pooled, Tensor]:
        """The batch after the extensions, the samples of all processes, and the advantages [N] of the nodes."""
        batch = self.extensions.samples_scored(batch)
        everyone = pooled(
            self.processes, batch.places, batch.rows, batch.experience, batch.scores, self.credit.stratum,
            batch.columns,
        )  # fmt: skip
        found = self.credit.advantages(everyone, batch, self.task.credit_model(), self.extensions)
        return batch, everyone, found.to(self.task.device)

    def collect(self, iteration: int) -> tuple[list[PromptRow], Any]:
        """This process's share of the iteration's prompts, and one round of samples of these prompts."""
        return self.collector.collect(iteration)

    def score(self, rewards: RewardSet, rows: list[PromptRow], experience: Collected) -> RewardBatch:
        """Rewards of all samples, whole groups at a time."""
        return rewards.score(*asked(rows, experience))

    def _judged(self, rows: Sequence[PromptRow], experience: Collected) -> Tensor:
        """[L] weighted sums of the rewards, for rollouts that depend on them."""
        return total_reward(self.score(self.rewards, list(rows), experience), experience)

    def advantages(self, scores: RewardBatch, experience: Collected, rows: Sequence[PromptRow]) -> Tensor:
        """[N] advantages of the nodes; a step has the advantage of the node it leads to.

        Every process must call it. Parts that remember prompts learn from the rollout, so call it once per iteration.
        """
        return self.compared(scores, experience, rows)[0]

    def compared(
        self, scores: RewardBatch, experience: Collected, rows: Sequence[PromptRow]
    ) -> tuple[Tensor, Tensor | None]:
        """The `advantages`, and the nodes [N] that the recipe's selection trains; None for all."""
        batch, _, found = self._compared(Batch(self.collector.places, rows, experience, scores))
        return found, self.credit.kept(batch)

    def update(self, experience: Collected, advantages: Tensor, keep: Tensor | None = None) -> dict[str, Any]:
        """Take all optimizer steps of one rollout; returns metrics.

        Args:
            experience: the rollout.
            advantages: [N] or [N, T], by node.
            keep: [N] bool, nodes that are trained; None for all.
        """
        return self.updater.update(experience, advantages, keep)
