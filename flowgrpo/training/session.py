"""Puts a run together from its recipe. Everything that can be wrong without a model is checked before one loads."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..configs.load import dump_recipe
from ..configs.schema import Recipe, RewardConfig
from ..pipelines.denoiser import Denoiser
from ..pipelines.policy import FlowPolicy
from ..pipelines.prompts import PromptCache
from ..pipelines.weights import LoraSpec, TrainedWeights, cast_base
from ..rewards.registry import RewardSpec
from ..rewards.runner import RewardSet
from .credit import credit_of
from .critic import Critic
from .data import PromptRow, PromptStream, columns_of, read_prompts
from .objectives import compares_with_base, form_of, penalties_of
from .planning import forecast, planner, surrogate_of
from .run_folder import RunFolder
from .trainer import Data, Reporter, Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def embedded_pipeline() -> Path:
    """The folder of the embedded scenes pipeline.

    Raises:
        ValueError: this installation lacks it.
    """
    folder = Path(str(resources.files("flowgrpo.scenes") / "pipeline"))
    if not (folder / "model_index.json").is_file():
        raise ValueError("the embedded pipeline is not installed; build it with `flowgrpo build scenes --out FOLDER`")
    return folder


def model_folder(path: str) -> str:
    """Resolve `scenes`, a folder or a hub id.

    Raises:
        ValueError: it looks like a path but there is no pipeline there.
    """
    if path == "scenes":
        return str(embedded_pipeline())
    folder = Path(path)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(
            f"model.path {path!r} holds no model_index.json; give the folder of a whole diffusers pipeline"
        )
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if not folder.is_dir() and looks_local:
        raise ValueError(
            f"model.path {path!r} is not a folder; give a pipeline folder, a hub id (owner/name) or scenes"
        )
    return path


def call_arguments(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline's call: those its folder recommends (`flowgrpo.json`), then the recipe's."""
    note = Path(path) / "flowgrpo.json"
    recommended = json.loads(note.read_text(encoding="utf-8"))["call"] if note.is_file() else {}
    return {**recommended, **given}


def load_pipeline(path: str, dtype: torch.dtype) -> Any:
    """Load a diffusers pipeline in `dtype`; components its folder leaves out are passed as None, as diffusers asks."""
    from diffusers import DiffusionPipeline

    index = Path(path) / "model_index.json"
    parts = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
    absent = {name: None for name, value in parts.items() if value == [None, None]}
    pipe = DiffusionPipeline.from_pretrained(path, torch_dtype=dtype, **absent)
    pipe.set_progress_bar_config(disable=True)
    vae = getattr(pipe, "vae", None)
    if isinstance(vae, torch.nn.Module) and not any(p.ndim == 5 for p in vae.parameters()):
        vae.to(memory_format=torch.channels_last)  # decodes in two thirds of the time
    return pipe


def quiet_libraries() -> None:
    """Keep libraries from writing over the progress of a run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # diffusers renames the argument; older versions that are supported know only this name.
    warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)


def reward_specs(entries: list[RewardConfig]) -> list[RewardSpec]:
    """Recipe entries as reward specifications."""
    return [RewardSpec(e.name, weight=e.weight, options=e.options, label=e.label) for e in entries]


class Session:
    """A run put together: recipe, data, rewards, then model, policy and trainer.

    Args:
        recipe: what to do.
        run: where to do it; None for measurements that write nothing.
        checked: the recipe's data and rewards, if they have been made already.

    Raises:
        ValueError: anything that is wrong with files, rewards or geometry, before the model is loaded.
    """

    def __init__(self, recipe: Recipe, run: RunFolder | None = None, checked: Checked | None = None) -> None:
        quiet_libraries()
        self.recipe, self.run = recipe, run
        checked = checked or Checked(recipe)
        self.data, self.rewards, self.evaluation = checked.data, checked.rewards, checked.evaluation
        if run is not None:
            self.rewards.quarantine = self.evaluation.quarantine = run.path / "failed"
        trackers: Any = list(recipe.run.trackers) or None
        self.accelerator = Accelerator(log_with=trackers, project_dir=run.path if run else None)
        _check_ranks(recipe, self.accelerator.num_processes)
        if trackers:
            self.accelerator.init_trackers("flowgrpo", config={"recipe": recipe.name})
        self.policy, self.evaluator = self._policies(checked.folder)
        self.plan_for = planner(recipe, recipe.sampler.sigmas or self.policy.denoiser.probe.sigmas)

    def _policies(self, folder: str) -> tuple[FlowPolicy, FlowPolicy]:
        model, sampler = self.recipe.model, self.recipe.sampler
        dtype = DTYPES[model.dtype]
        pipe = load_pipeline(folder, dtype)
        cast_base(pipe, dtype)
        pipe.to(self.accelerator.device)
        call = call_arguments(folder, model.call)
        if model.train == "lora":
            targets = None if model.lora.targets is None else tuple(model.lora.targets)
            spec = LoraSpec(rank=model.lora.rank, alpha=model.lora.alpha, targets=targets, init=model.lora.init)
            weights = TrainedWeights.lora(pipe, spec, seed=self.recipe.run.seed)
        else:
            weights = TrainedWeights.full(pipe, keep_reference=compares_with_base(self.recipe))
        weights.gradient_checkpointing(model.gradient_checkpointing)
        cache = self.cache = PromptCache(pipe, call)
        if model.release_text_encoders:
            cache.encode(list(dict.fromkeys(row.text for row in [*self.data.train.rows, *self.data.heldout])))
            cache.release()
        steps = len(sampler.sigmas) - 1 if sampler.sigmas else sampler.steps
        policies = []
        for number in (steps, self.recipe.evaluate.steps or steps):
            denoiser = Denoiser(pipe, num_steps=number, call=call, variant=model.variant)
            with torch.enable_grad():
                denoiser.self_check([row.text for row in self.data.train.rows[:2]])
            policies.append(self._policy(denoiser, weights))
        return policies[0], policies[1]

    def _policy(self, denoiser: Denoiser, weights: TrainedWeights) -> FlowPolicy:
        objective, rollout = self.recipe.objective, self.recipe.rollout
        return FlowPolicy(
            denoiser,
            weights,
            ratio=objective.ratio,
            weight=objective.weight,
            batch=rollout.batch,
            decode_batch=rollout.decode_batch,
            penalties=penalties_of(self.recipe) if objective.form == "transition" else (),
        )

    def trainer(self, reporter: Reporter) -> Trainer:
        """The trainer of this run."""
        if self.run is None:
            raise ValueError("a trainer needs a run folder; give Session a RunFolder")
        return Trainer(
            self.recipe, self.policy, self.evaluator, self.plan_for, self.rewards, self.evaluation, self.data,
            self.run, self.accelerator, reporter, self._critic(),
        )  # fmt: skip

    def _critic(self) -> Critic | None:
        if self.recipe.critic is None:
            return None
        return Critic(
            self.recipe.critic, self.policy.denoiser.probe.latent_shape, self.cache.features,
            self.data.train.rows[0].text, seed=self.recipe.run.seed, device=self.policy.device,
        )  # fmt: skip


def read_data(recipe: Recipe) -> Data:
    """Read the prompt files of a recipe; raises ValueError naming file and line of what is wrong."""
    train = read_prompts(recipe.data.train)
    if recipe.rollout.prompts > len(train):
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} but {recipe.data.train} holds {len(train)} prompts; use at "
            f"most {len(train)} or a longer file"
        )
    heldout: list[PromptRow] = read_prompts(recipe.data.heldout) if recipe.data.heldout else []
    return Data(PromptStream(train, recipe.run.seed), heldout[: recipe.evaluate.prompts])


class Checked:
    """What of a recipe can be read and made without its model.

    Raises:
        ValueError: whatever is wrong with prompt files, model path, rewards, their columns, plan or surrogate.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.data = read_data(recipe)
        self.folder = model_folder(recipe.model.path)
        forecast(recipe)
        surrogate_of(recipe, 1)
        credit_of(recipe.advantage)
        form_of(recipe)
        self.rewards = RewardSet(reward_specs(recipe.rewards))
        evaluated = recipe.rewards if recipe.evaluate.rewards is None else recipe.evaluate.rewards
        self.evaluation = RewardSet(reward_specs(evaluated))
        for rewards, rows in ((self.rewards, self.data.train.rows), (self.evaluation, self.data.heldout)):
            for reward in rewards.rewards if rows else ():
                reward.check("images", columns_of(rows), grouped=True)


def _check_ranks(recipe: Recipe, ranks: int) -> None:
    prompts, updates = recipe.rollout.prompts, recipe.optimizer.updates
    if prompts % ranks:
        raise ValueError(f"rollout.prompts is {prompts} on {ranks} ranks; use a multiple of {ranks}")
    if updates > prompts // ranks:
        raise ValueError(
            f"optimizer.updates is {updates} with {prompts // ranks} prompts on each of {ranks} ranks; use at most "
            f"{prompts // ranks}, or more rollout.prompts"
        )
    advantage = recipe.advantage
    whitened = advantage.how == "gdpo" and len(recipe.rewards) > 1
    if ranks > 1 and (advantage.scale == "batch" or advantage.credit == "value" or whitened):
        raise ValueError(
            "advantage.scale batch, how gdpo and credit value need all rewards on one rank; use one process, or scale "
            "group, how sum and another credit"
        )
    if recipe.critic is not None and ranks > 1:
        raise ValueError("a critic is trained on one rank; use one process, or a recipe without `critic`")


def start(recipe: Recipe, folder: Path) -> Session:
    """Check a recipe, make its run folder and load its model."""
    checked = Checked(recipe)
    return Session(recipe, RunFolder.create(folder, dump_recipe(recipe)), checked)
