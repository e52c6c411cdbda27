"""Puts a run together from its recipe. Everything that does not need the model is checked before the model loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from ..configs.load import dump_recipe
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ..configs.sections import LoraConfig
from ..configs.trust import remember_run
from ..parts.traits import keeps_base
from ..pipelines.acceleration import compile_blocks, use_attention
from ..pipelines.capture import PipelineCall
from ..pipelines.denoiser import Denoiser
from ..pipelines.pipeline_error import PipelineError
from ..pipelines.placement import place
from ..pipelines.policy import FlowPolicy
from ..pipelines.prompt_cache import PromptCache
from ..rewards.runner import RewardSet
from ..text.masked_model import MaskedLanguageModel, load_masked_model
from ..text.model import LanguageModel, LanguageWeights, load_language_model, note_on_experts, reinitialise
from ..text.pictured import PicturedIds
from ..text.sampling import stopping
from ..text.sight_check import check_sight
from ..weights.kernel_choice import in_a_fixed_order
from ..weights.saving import local_folder
from ..weights.token_split import split_tokens
from ..weights.trained import LoraSpec, TrainedWeights, cast_base
from .checking import check, evaluated, reward_specs
from .data import Data, PromptRow, column_names
from .distributed.context_groups import ContextGroup, LedRewards, context_of
from .distributed.launching import load_whole_models, notes_on_launch, sharding_of, zero_of
from .distributed.processes import Processes, ended_together
from .extensions.extension import Extensions
from .folder.run_folder import RunFolder
from .images.conditioning import take_pictures
from .images.critic import Critic
from .images.evaluator import Evaluator
from .images.image_teachers import add_teachers
from .images.prompt_sizes import SIDES, take_sizes
from .images.scouting import Scouts
from .images.sized_rollout import SizedPolicies
from .lora_start import begin, with_start
from .masked.masked_policy import MaskedPolicy
from .masked.masked_task import MaskedTask
from .model_paths import (
    DTYPES,
    UNTRAINED,
    call_arguments,
    load_pipeline,
    loading_options,
    quiet_libraries,
    with_pictures_read,
)
from .number_format import notes_on_format
from .planning import levels_of, planner, steps_of, steps_to_train
from .prompt_embeddings import SPARE_EMBEDDINGS, kept_prompts, met_prompts
from .prompts.prompt_rows import Size
from .recipe_findings import Checked
from .recipe_launches import check_ranks
from .recipe_prompts import columns_of_run, kind_of_run, with_revisions
from .reporting.reporter import Reporter
from .reporting.tracking import Trackers
from .stopping import Stop
from .tasks import FlowTask, Task
from .teachers import checked_on, contexts_of, named, teachers_of
from .text.checked_prompts import Note, check_answers, check_prompts
from .text.text_policy import TextPolicy, check_positions
from .text.text_task import TextTask
from .text.whole_answers import compares
from .trainer import Trainer
from .updating import library_of

if TYPE_CHECKING:
    from ..weights.sharding import Shards

LOOKED_AT = 16
"""Number of prompts among which one is taken for `check_sight`."""
Doing = Callable[..., None]
"""Called with what is done now, and maybe with how much of it is done, and with the whole."""


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """Tell nobody."""


class Session:
    """A run put together: recipe, data, rewards, then model and trainer.

    Args:
        recipe: what to do.
        run: the run folder; None for measurements that write nothing.
        checked: the recipe after its check, if the check was made already.
        model: a pipeline of images or a language model that replaces the model of the recipe.
        doing: is told what is loaded.
        new: whether the run folder was made for this run. If the run cannot begin, the folder is removed again.

    Raises:
        ValueError: files, rewards or geometry are wrong. It is raised before the model is loaded.
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        run: RunFolder | None = None,
        checked: Checked | None = None,
        model: Any = None,
        doing: Doing = silent,
        new: bool = False,
    ) -> None:
        quiet_libraries()
        self._doing, self._new, self.run = doing, new, run
        if checked is None:
            doing("checking the recipe")
        with self._beginning():
            self.recipe, self._model = with_start(recipe), model
            self.trackers = Trackers(self.recipe, run, Processes.of_this_run().rank == 0)
            with self._tracked():
                self._assemble(checked or check(recipe))

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        """End all processes together if the run cannot begin, and free the folder of a new run."""
        try:
            with ended_together():
                yield
        except BaseException:
            # A process that fails ends the others at once, so it may be the only one that can remove the folder.
            if self._new and self.run is not None:
                self.run.abandon()
            raise

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Tell the trackers if the run cannot begin."""
        try:
            yield
        except BaseException:
            self.trackers.end(failed=True)
            raise

    def _assemble(self, checked: Checked) -> None:
        recipe, run = self.recipe, self.run
        if recipe.run.fixed_order:
            in_a_fixed_order()
        if run is not None and Processes.of_this_run().rank == 0:
            run.claim()
        self.data, self.notes = checked.require(), checked.texts("note")
        self.trackers.note = self.notes.append
        self.accelerator = Accelerator()
        check_ranks(recipe, self.accelerator.num_processes)
        # Rewards and models may take long to load, and a tracker may ask for a login. A run that is resumed knows its
        # iteration only when the checkpoint is chosen.
        if run is not None and not run.begun:
            self.trackers.start(0)
        context = context_of(recipe)
        self._group = None if context == 1 else ContextGroup(context)
        load_whole_models()
        self._doing("loading the rewards")
        self._make_rewards()
        if run is not None:
            self.rewards.quarantine = self.evaluation.quarantine = run.path / "failed"
            again = f"When the reward works again, go on with `flowgrpo resume {run.path}`."
            self.rewards.advice = self.evaluation.advice = again
        device = self.accelerator.device
        self.notes += notes_on_format(recipe.model.dtype, device)
        library_of(recipe)  # a fault is told before the model loads
        shard = sharding_of(recipe, self.accelerator)
        zero_of(recipe, self.accelerator)
        self.notes += notes_on_launch(recipe, self.accelerator)
        self.task: Task
        if isinstance(recipe, Recipe):
            self.task = load_flow_task(
                recipe, checked.folder, self.data, device, self._model, shard, self._doing, context
            )
            return
        self._doing("loading the model")
        if isinstance(recipe, TextRecipe):
            self.task = load_text_task(recipe, checked.folder, self.data, device, self._note, self._model)
        else:
            self.task = load_masked_task(recipe, checked.folder, self.data, device, self._note, self._model)

    def _note(self, text: str) -> None:
        # The check of the recipe has often said it already, from the tokenizer alone.
        if text not in self.notes:
            self.notes.append(text)

    def _make_rewards(self) -> None:
        """Make the rewards before the model, so that a fault of a reward is reported without a wait."""
        recipe = self.recipe
        make = RewardSet if self._group is None else partial(LedRewards, group=self._group)
        self.rewards = make(reward_specs(recipe.rewards))
        self.evaluation = make(reward_specs(evaluated(recipe)))
        self.extensions = Extensions.of(recipe, self.rewards.names, self.evaluation.names)
        kind = kind_of_run(recipe, fetch=True)
        sides = (self.rewards, self.data.train.rows, False), (self.evaluation, self.data.heldout, True)
        for rewards, rows, evaluation in sides:
            given = columns_of_run(recipe, evaluation)
            for reward in rewards.rewards if rows else ():
                reward.check(kind, column_names(rows, given), grouped=True)

    def trainer(self, reporter: Reporter, stop: Stop | None = None) -> Trainer:
        """The trainer of this run; `stop` may end it."""
        if self.run is None:
            raise ValueError("a trainer needs a run folder; give Session a RunFolder")
        with self._beginning(), self._tracked():
            return Trainer(
                self.recipe, self.task, self.rewards, self.evaluation, self.data, self.run, self.accelerator,
                self.trackers, reporter, self.extensions, stop,
            )  # fmt: skip


def lora_spec(config: LoraConfig) -> LoraSpec:
    """The adapter that a recipe describes."""
    targets = None if config.targets is None else tuple(config.targets)
    return LoraSpec(rank=config.rank, alpha=config.alpha, targets=targets, init=config.init, compute=config.compute)


def load_flow_task(
    recipe: Recipe,
    folder: str,
    data: Data,
    device: torch.device,
    pipe: Any = None,
    shard: Callable[[dict[str, torch.nn.Module]], Shards] | None = None,
    doing: Doing = silent,
    context: int = 1,
) -> FlowTask:
    """Load a pipeline unless it is given, add the trained weights, encode the prompts and check the replay.

    If `shard` is given, it cuts the weights of the denoiser before they are moved to the device. `doing` is told what
    happens. `context` processes evaluate each sample together.
    """
    model = recipe.model
    dtype, source = DTYPES[model.dtype], None
    doing("loading the pipeline")
    if pipe is None:
        folder = source = local_folder(folder)
        pipe = load_pipeline(folder, dtype, model.quantize, model.pipeline)
    else:
        # A pipeline from files keeps what its class keeps in float32, such as BRIA's VAE.
        cast_base(pipe, dtype)
    if shard is None:
        place(pipe, device, model.offload)
    if model.attention is not None:
        use_attention(pipe, model.attention)
    call = call_arguments(folder, model.call)
    shown_call = {**call, **with_pictures_read(recipe.evaluate.call, "evaluate.call.")}
    parameters = PipelineCall(pipe, call).parameters
    take_sizes(data, recipe, folder, call, parameters)
    take_pictures(data, recipe, call, parameters)
    trains_sizes = any(row.size is not None for row in data.train.rows)
    if shard is not None and (trains_sizes or any(row.size is not None for row in data.heldout)):
        raise ValueError(
            "prompts have sizes of their own, and the weights are in shards (FSDP2), whose processes must make equal "
            "calls; launch with --multi_gpu or --use_deepspeed --zero_stage 2 in place of --use_fsdp, or leave the "
            "columns height and width out"
        )
    if shard is not None and recipe.sampler.plan.get("each") == "prompt":
        raise ValueError(
            "sampler.plan.each is prompt, and weights in shards (FSDP2) need processes that make equal calls; "
            "launch with --multi_gpu or --use_deepspeed --zero_stage 2 in place of --use_fsdp, or write each: iteration"
        )
    if model.train == "lora":
        weights = TrainedWeights.lora(pipe, lora_spec(model.lora), seed=recipe.run.seed, shard=shard)
        begin(weights, recipe)
    else:
        weights = TrainedWeights.full(pipe, keep_reference=keeps_base(recipe), shard=shard, source=source)
    if shard is not None:
        place(pipe, device, model.offload)
    if model.teachers:
        doing("loading the teachers")
        add_teachers(weights, model)
    weights.gradient_checkpointing(model.gradient_checkpointing)
    doing("preparing the pipeline")
    if model.compile:
        compile_blocks(pipe)
    if context > 1:
        split_tokens(weights.modules, context)
    cache = PromptCache(
        pipe, call, most=kept_prompts(recipe, len(data.heldout)), spare=SPARE_EMBEDDINGS, overflow="cpu",
        changes=[with_pictures_read(changes, "call.") for changes in recipe.other_calls],
    )  # fmt: skip
    if model.release_text_encoders:
        rows = met_prompts(recipe, data)
        for number, row in enumerate(rows):
            doing("encoding prompts", number, len(rows))
            cache.encode([row.prompt])
        cache.release()
    doing("checking that the pipeline's own loop is reproduced")
    shown = checked_on(recipe.model, data.train.rows)
    policy, sized = _policies(recipe, pipe, call, weights, shown)
    evaluator = Evaluator(recipe, policy, sized)
    if recipe.evaluate.call or steps_of(recipe) != steps_of(recipe, evaluation=True):
        steps = steps_of(recipe, evaluation=True)
        evaluator = Evaluator(recipe, *_policies(recipe, pipe, shown_call, weights, shown, steps))
    scouts = recipe.rollout.scouts
    scouting = (
        None if scouts is None else Scouts(recipe, _policies(recipe, pipe, call, weights, shown, scouts.steps)[1])
    )
    fidelity, guided = None, False
    given = [rows[0] for rows in (data.train.rows, data.beside) if rows and rows[0].given]
    if given:
        doing("checking that given images come back from their latents")
        row = given[0]
        own = policy if row.size is None else sized.of(row.size)
        try:
            fidelity = own.fidelity([sample.read() for sample in row.given], [row.prompt] * len(row.given))
        except PipelineError as error:
            # The prompts of images beside a rollout are others than the ones with which the pipeline was just checked.
            raise PipelineError(f"{row.place}: {error}") from error
        guided = own.guides(row.prompt)
    unread = policy.unread(shown[0].prompt)
    critic = None
    if recipe.critic is not None:
        critic = Critic(
            recipe.critic, policy.denoiser.probe.latent_shape, cache.features, shown[0].prompt,
            seed=recipe.run.seed, device=policy.device,
        )  # fmt: skip
    plan_for = planner(recipe, levels_of(recipe, policy.denoiser.probe.sigmas))
    return FlowTask(
        recipe, policy, evaluator, plan_for, critic, sized if trains_sizes else None, fidelity, guided, data.beside,
        scouting, unread,
    )  # fmt: skip


def _policies(
    recipe: Recipe,
    pipe: Any,
    call: dict[str, Any],
    weights: TrainedWeights,
    shown: Sequence[PromptRow],
    steps: int | None = None,
) -> tuple[FlowPolicy, SizedPolicies]:
    """The policy of a call after the check of its replay, and the policies of the sizes of prompts.

    `steps` is the number of steps of a policy that only samples; without it, the policy has the steps that are trained.
    """
    number, prompts = steps_of(recipe) if steps is None else steps, [row.prompt for row in shown[:2]]
    contexts: dict[str, list[tuple[str, str]]] = {}
    for name, row, known in zip(teachers_of(recipe.model, shown), shown, contexts_of(recipe.model, shown)):
        contexts.setdefault(name, []).append((row.prompt, known.prompt))

    def checked_policy(size: Size | None = None) -> FlowPolicy:
        own = call if size is None else {**call, **dict(zip(SIDES, size))}
        denoiser = Denoiser(pipe, num_steps=number, call=own, variant=recipe.model.variant, example=prompts[0])
        with torch.enable_grad():
            denoiser.self_check(prompts)
        made = flow_policy(recipe, denoiser, weights)
        if steps is None:
            made.require_calls(prompts, contexts)
        return made

    policy = checked_policy()
    return policy, SizedPolicies(policy, checked_policy)


def flow_policy(recipe: Recipe, denoiser: Denoiser, weights: TrainedWeights) -> FlowPolicy:
    """The policy of a denoiser and its weights, which samples and scores as the recipe says."""
    objective, rollout = recipe.objective, recipe.rollout
    return FlowPolicy(
        denoiser,
        weights,
        # An objective without these options trains no transition, so the defaults have no effect.
        ratio=objective.get("ratio", "guard"),
        weight=objective.get("weight", "guard"),
        batch=rollout.batch,
        decode_batch=rollout.decode_batch,
        store=rollout.store,
        reference_call=with_pictures_read(recipe.model.reference_call, "model.reference_call."),
        pool=steps_to_train(recipe),
        teachers={
            name: with_pictures_read(teacher.call, f"model.teachers.{k}.call.")
            for k, (name, teacher) in enumerate(named(recipe.model.teachers).items())
        },
        moving={
            name: teacher.weights
            for name, teacher in named(recipe.model.teachers).items()
            if teacher.weights != "start"
        },
    )


def load_text_task(
    recipe: TextRecipe,
    folder: str,
    data: Data,
    device: torch.device,
    note: Note,
    language: LanguageModel | None = None,
) -> TextTask:
    """Load a language model unless it is given, add the trained weights and check that every prompt can be encoded.

    `note` is told how many prompts are left out.

    Raises:
        ValueError: a prompt is longer than the recipe allows, or a prompt is a conversation and the model has no chat
            template.
    """
    model = recipe.model
    if language is None:
        language = load_language_model(folder, **loading_options(model))
    if recipe.generation.stop:
        stopping(language.tokenizer, recipe.generation.stop)  # a fault is told before the run
    if model.path == UNTRAINED:
        reinitialise(language, recipe.run.seed)
    language.model.to(device)
    if language.keeps_states and model.shared_prefix and not model.gradient_checkpointing:
        note(
            f"{type(language.model).__name__} keeps states of the past, through which no gradient passes, so each "
            "completion is scored together with its prompt; model.shared_prefix changes nothing"
        )

    def prompt_tokens(row: PromptRow) -> int:
        return len(language.encode(row.text, row.messages, row.pictures))

    check_prompts(
        recipe,
        data,
        prompt_tokens,
        lambda row, count: check_positions(language, row.text, count, recipe.generation.max_tokens),
        note,
    )
    check_answers(recipe, data, prompt_tokens, language.answer_tokens, note)
    if model.pictures:
        some = [language.encode(row.text, row.messages, row.pictures) for row in data.train.rows[:LOOKED_AT]]
        # In a short prompt with a small picture, positions may be the same by several rules.
        check_sight(language, max((ids for ids in some if isinstance(ids, PicturedIds)), key=len))
    if model.train == "lora":
        weights = LanguageWeights.adapter(language, lora_spec(model.lora), seed=recipe.run.seed)
        begin(weights, recipe)
        if (said := note_on_experts(language.model)) is not None:
            note(said)
    else:
        weights = LanguageWeights.whole(language, keep_reference=compares(recipe))
    weights.gradient_checkpointing(model.gradient_checkpointing)
    return TextTask(recipe, TextPolicy(language, weights, recipe))


def load_masked_task(
    recipe: MaskedRecipe,
    folder: str,
    data: Data,
    device: torch.device,
    note: Note,
    language: MaskedLanguageModel | None = None,
) -> MaskedTask:
    """Load a masked language model unless it is given, add the trained weights, and check that each prompt is encoded.

    `note` is told how many prompts are left out.

    Raises:
        ValueError: a prompt is longer than the recipe allows, or the model has no room for it and its completion.
    """
    model = recipe.model
    if language is None:
        language = load_masked_model(folder, **loading_options(model))
    language.model.to(device)
    if model.train == "lora":
        weights = LanguageWeights.adapter(language, lora_spec(model.lora), seed=recipe.run.seed)
        begin(weights, recipe)
    else:
        weights = LanguageWeights.whole(language, keep_reference=compares(recipe))
    weights.gradient_checkpointing(model.gradient_checkpointing)
    policy = MaskedPolicy(language, weights, recipe)

    def prompt_tokens(row: PromptRow) -> int:
        return len(language.encode(row.text, row.messages)[0])

    check_prompts(recipe, data, prompt_tokens, lambda row, count: policy.frame(row.text, row.messages), note)
    check_answers(recipe, data, prompt_tokens, language.answer_tokens, note)
    return MaskedTask(recipe, policy)


def start(
    recipe: AnyRecipe, folder: Path, made: Callable[[Path], None] | None = None, doing: Doing = silent
) -> Session:
    """Check a recipe, make its run folder, call `made` with the folder, and load the model.

    If the model cannot be loaded, or the trainer cannot be made, the run folder is removed again.

    `doing` is told what happens.
    """
    doing("checking the recipe")
    with ended_together():
        processes = Processes.of_this_run()
        recipe = with_revisions(recipe, processes)
        checked = check(recipe)
        checked.require()
        recipe = with_start(recipe)
        run = _shared_folder(folder, dump_recipe(recipe), processes)
    if made is not None:
        made(run.path)
    return Session(recipe, run, checked, doing=doing, new=True)


def _shared_folder(folder: Path, config: str, processes: Processes) -> RunFolder:
    """The folder of a new run. The first process makes it, and its path counts; the other processes open it."""
    made = RunFolder.create(folder, config) if processes.rank == 0 else None
    path = processes.gather(None if made is None else made.path)[0]
    assert path is not None
    if not (path / "config.yaml").is_file():
        raise ValueError(
            f"process {processes.rank} does not find the run folder {path} that process 0 has made; put it where all "
            "processes read and write the same files"
        )
    if made is None:
        # This process may be on another machine than the first, which has remembered the run there.
        remember_run(path, config)
    return made or RunFolder.open(path)
