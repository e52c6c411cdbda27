"""The check of a recipe before a model loads. `flowgrpo plan` and every run make the same check."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ..configs.reward_sections import RewardConfig
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ..parts.choice import value_at
from ..parts.traits import rewarded
from ..rewards.base import MissingDependency, Reward, RewardSpec
from ..rewards.given import score_of
from ..rewards.registry import hub_ids, outline, servers
from ..text.seeing_types import may_see
from .balance import Balance
from .credit.from_scores import Credit
from .data import IMAGE, PromptRow, column_names, prompt_path
from .extensions.extension import Extensions
from .images.conditioning import call_parameters
from .images.image_teachers import check_teacher_weights
from .images.prompt_sizes import note_frames, with_own_call
from .lora_start import check_start
from .recipe_findings import Checked, Fault, hub_note
from .recipe_models import check_model
from .recipe_plans import check_plans, idle_plan_options
from .recipe_prompts import (
    check_data,
    columns_of_run,
    given_columns,
    kind_of_run,
    note_left_out,
    note_oddities,
    note_shared_prompts,
    shows_pictures,
    sound_prompts,
)
from .recipe_rounds import is_uneven, refuse_comparisons
from .teachers import PRESENT, check_teachers, own_teacher
from .text.answer_objective import tried
from .text.forms import FORMS
from .text.forms.filling import missing_columns
from .text.forms.from_data import answer_of
from .text.whole_answers import try_loss

HIGHEST_FULL_RATE = 2e-4
"""On the embedded model, full weights learn at 1e-4; at the LoRA's 1e-3 ten iterations ruin it."""

HIGHEST_OWN_RATE = 5e-5
"""Published recipes train all weights of large models at about 1e-5."""

HIGHEST_RATE = 0.1
"""Rates above it are a slip of the pen, such as 1e5 for 1e-5."""

SMALL_MODEL = 2**28
"""Bytes of weight files: below them a model is taken for one of the size of the embedded pipeline, 11 MB."""


def check(recipe: AnyRecipe, *, reads_test: bool = False, fetches: bool = True) -> Checked:
    """Check everything that a recipe names: prompt files, model, arguments of its call, rewards and trackers.

    The check reads no weights and makes no reward that could read weights. It uses a network only to download prompts.

    Args:
        recipe: the recipe.
        reads_test: read the test prompts as well. A run does not read them; it only checks that the file is there.
        fetches: whether prompts of the hub are downloaded if they are not on this machine.
    """
    found = Checked(recipe, fetches=fetches)
    found.data = check_data(found)
    check_start(found)
    check_model(found)
    if isinstance(recipe, Recipe):
        check_teacher_weights(found, recipe)
    if found.data is not None and not isinstance(recipe, MaskedRecipe):
        found.attempt("data.train", check_teachers, recipe.model, found.data.train.rows, recipe.data.train)
    _rate(found)
    _repeats(found)
    _moving_teacher(found)
    _note_columns(found)
    _combinations(found)
    _form(found)
    _rewards(found)
    if found.data is not None and recipe.data.heldout is not None:
        note_shared_prompts(found, found.data.heldout, recipe.data.heldout, "heldout")
    _test_prompts(found, reads_test)
    _trackers(found)
    return found


def reward_specs(entries: list[RewardConfig]) -> list[RewardSpec]:
    """The entries of a recipe as reward specifications."""
    return [
        RewardSpec(e.name, weight=e.weight, options=e.options, label=e.label, time_limit=e.time_limit) for e in entries
    ]


def evaluated(recipe: AnyRecipe) -> list[RewardConfig]:
    """The rewards of a recipe's evaluations."""
    return recipe.rewards if recipe.evaluate.rewards is None else recipe.evaluate.rewards


def _test_prompts(found: Checked, reads: bool) -> None:
    """Check that the file of the test prompts is there; if it is to be read, check it like the held-out prompts."""
    recipe, source = found.recipe, found.recipe.data.source("test")
    if source is None:
        return
    if not reads:
        found.attempt("data.test", prompt_path, source)
        return
    rows = found.attempt("data.test", sound_prompts, recipe, source, found.fetches)
    if rows is None or found.data is None:
        return
    if isinstance(recipe, Recipe) and found.folder and "model" not in found.faulty:
        rows = found.attempt("data.test", with_own_call, rows, source, recipe.as_evaluated, found.folder) or rows
    columns = column_names(rows, columns_of_run(recipe, evaluation=True))
    for spec in reward_specs(evaluated(recipe)):
        try:
            reward = outline(spec)
        except (ValueError, OSError, MissingDependency):
            continue  # The check of the rewards has said what is wrong.
        found.attempt("data.test", _check_reward, found, reward, columns, source)
    note_shared_prompts(found, rows, source, "test")


def _note_columns(found: Checked) -> None:
    """Note the columns of prompts that the run leaves out."""
    recipe, data = found.recipe, found.data
    if data is None or found.texts("fault", "needed"):
        return
    parameters = call_parameters(found.folder, recipe.model.pipeline) if isinstance(recipe, Recipe) else {}
    takes = None if parameters is None else IMAGE in parameters or shows_pictures(recipe)
    for source, rows in ((recipe.data.train, data.train.rows), (recipe.data.heldout, data.heldout)):
        note_left_out(found, str(source), rows, takes)
        _note_hidden(found, str(source), rows)
        note_oddities(found, str(source), rows)


def _note_hidden(found: Checked, source: str, rows: Sequence[PromptRow]) -> None:
    """Note pictures of prompts that a model could be shown, and is not."""
    recipe = found.recipe
    hidden = isinstance(recipe, TextRecipe) and not recipe.model.pictures and found.folder
    if hidden and any(row.columns.get(IMAGE) for row in rows) and may_see(Path(found.folder)):
        text = (
            f"{source} has a column `{IMAGE}`, and {recipe.model.path} is not shown the pictures; write "
            "model.pictures: true if it should be"
        )
        found.findings.append(Fault("note", text, "model.pictures"))


def _rate(found: Checked) -> None:
    """Note a learning rate that is no rate at all, or too high for all weights, because it soon ruins the model."""
    recipe = found.recipe
    rate, images = recipe.optimizer.learning_rate, isinstance(recipe, Recipe)
    usual = "1e-5" if images else "1e-6"
    if rate > HIGHEST_RATE:
        text = f"optimizer.learning_rate is {rate:g}, and no model learns at it; rates are below {HIGHEST_RATE:g}"
    elif recipe.model.train != "full":
        return
    elif rate > HIGHEST_FULL_RATE and images:
        text = (
            f"model.train is full and moves every weight, but optimizer.learning_rate {rate:g} is a rate for a LoRA; "
            "begin with 1e-5 to 1e-4"
        )
    elif rate > HIGHEST_OWN_RATE and not _is_small(found.folder):
        text = (
            f"this run trains all weights of {recipe.model.path}, and optimizer.learning_rate {rate:g} suits the small "
            f"model of the package; a large model needs about {usual}, or a LoRA, which also takes less memory: write "
            "model.train=lora and optimizer.learning_rate=3e-4"
        )
    else:
        return
    found.findings.append(Fault("note", text, "optimizer.learning_rate"))


def _repeats(found: Checked) -> None:
    """Note evaluations that write the same completion several times."""
    evaluate = found.recipe.evaluate
    if evaluate.seeds > 1 and getattr(evaluate, "temperature", None) == 0:
        text = (
            f"evaluate.seeds is {evaluate.seeds}, and without a temperature all completions of a prompt are equal; set "
            "evaluate.temperature, such as 1.0, or leave evaluate.seeds out"
        )
        found.findings.append(Fault("note", text, "evaluate.seeds"))


def _moving_teacher(found: Checked) -> None:
    """Note a policy that teaches itself with its present weights, and that no reward holds."""
    recipe, chosen = found.recipe, found.recipe.objective
    if isinstance(recipe, Recipe):
        for k, teacher in enumerate(recipe.model.teachers):
            if teacher.weights == "present" and not rewarded(recipe):
                text = (
                    f"model.teachers.{k} has the present weights, so each step moves the teacher too, and the two may "
                    "drift away together; weights: start keeps the teacher as it is, and weights: reference slows it"
                )
                found.findings.append(Fault("note", text, f"model.teachers.{k}.weights"))
    elif own_teacher(recipe) == PRESENT and chosen["others"] == "none" and not chosen["both"]:
        text = (
            "the policy teaches itself with its present weights, so each step moves its teacher too, and the two may "
            "drift away together; objective.frozen: true keeps the teacher as it is, and objective.ema slows it"
        )
        found.findings.append(Fault("note", text, "objective"))


def _is_small(folder: str) -> bool:
    files = [file for ending in ("safetensors", "bin") for file in Path(folder).rglob(f"*.{ending}")] if folder else []
    return 0 < sum(file.stat().st_size for file in files) < SMALL_MODEL


def _combinations(found: Checked) -> None:
    """Check what the schema cannot see: options that a part refuses, and plans that train no step."""
    recipe = found.recipe
    checks: list[Callable[[], Any]] = [lambda: Credit(recipe)]
    balance = value_at(recipe, "objective.balance")
    if balance is not None:
        checks.append(lambda: Balance(balance))
    if isinstance(recipe, TextRecipe):
        checks.append(lambda: tried(recipe))
    elif isinstance(recipe, MaskedRecipe) and (loss := recipe.objective.get("loss")) is not None:
        checks += [lambda: try_loss(loss), lambda: check_plans(recipe)]
    else:
        checks.append(lambda: check_plans(recipe))
    for one in checks:
        found.attempt("", one)
    if not isinstance(recipe, TextRecipe) and not found.texts("fault"):
        found.findings += [Fault("note", note, "sampler.plan") for note in idle_plan_options(recipe)]


def _form(found: Checked) -> None:
    """Check that the prompts have what a form or plan reads of them, before a group needs it."""
    recipe, data = found.recipe, found.data
    if data is None:
        return
    chosen, key = None, "rollout.form"
    if isinstance(recipe, TextRecipe) and recipe.rollout.form.name in FORMS:
        chosen = recipe.rollout.form
    elif isinstance(recipe, MaskedRecipe) and given_columns(recipe):
        chosen, key = recipe.sampler.plan, "sampler.plan"
    if chosen is not None:
        faults = missing_columns(chosen, column_names(data.train.rows), key)
        found.findings += [Fault("fault", f"{recipe.data.train}: {one}", key) for one in faults]
        if not found.texts("fault"):
            found.attempt(key, _answers, recipe, data.train.rows)
    if given_columns(recipe):
        found.attempt("rewards", _given_scores, recipe, data.train.rows)


def _given_scores(recipe: AnyRecipe, rows: Sequence[PromptRow]) -> None:
    """Check the scores that the data give to samples, before a sample is scored."""
    for entry in recipe.rewards:
        scores = entry.options.get("scores") if entry.name == "given" else None
        for row in rows:
            for column in scores if isinstance(scores, list) else ():
                try:
                    score_of(row.columns.get(column), column)
                except ValueError as error:
                    raise ValueError(f"{row.place}: {error}") from None


def _answers(recipe: AnyRecipe, rows: Sequence[PromptRow]) -> None:
    """Check that the data give a completion of every prompt, if the recipe takes them from there."""
    for row in rows:
        for column in given_columns(recipe):
            answer_of(row, column)


def _rewards(found: Checked) -> None:
    recipe, data = found.recipe, found.data
    sides = [
        ("rewards", recipe.rewards, recipe.data.train, data and data.train.rows),
        ("evaluate.rewards", evaluated(recipe), recipe.data.heldout, data and data.heldout),
    ]
    outlines: list[list[Reward | None]] = []
    for key, entries, source, rows in sides:
        specs = reward_specs(entries)
        outlined = [found.attempt(f"{key}.{k}", outline, spec) for k, spec in enumerate(specs)]
        outlines.append(outlined)
        made = [reward for reward in outlined if reward is not None]
        asked = [(reward, where) for spec, reward in zip(specs, outlined) if reward for where in servers(spec)]
        found.findings += [Fault("unknown", f"the server of reward {one.name} at {where}", key) for one, where in asked]
        read = [(reward, model) for spec, reward in zip(specs, outlined) if reward for model in hub_ids(spec)]
        found.findings += [Fault("unknown", hub_note(f"reward {one.name}: model", m), key) for one, m in read]
        found.attempt(key, _named_once, made)
        if rows:
            columns = column_names(rows, columns_of_run(recipe, evaluation=key != "rewards"))
            for reward in made:
                found.attempt(key, _check_reward, found, reward, columns, str(source))
        if key == "rewards" and is_uneven(recipe):
            found.attempt(key, refuse_comparisons, made)
    note_frames(found, [name for side in outlines for one in side if one for name in (*one.needed, *one.optional)])
    trained, scored = outlines
    if None not in (*trained, *scored):
        found.attempt("extensions", _extensions, recipe, trained, scored)
    found.findings = list({(f.kind, f.text): f for f in found.findings}.values())


def _named_once(rewards: Sequence[Reward]) -> None:
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two rewards are called {twice[0]!r}; give one of them a `label`")


def _check_reward(found: Checked, reward: Reward, columns: Collection[str], source: str) -> None:
    kind = kind_of_run(found.recipe)
    if "sounds" in reward.needed and kind == "images" and not Path(found.folder).is_dir():
        # The model is on the hub, so nothing here says what it makes.
        return
    try:
        reward.check(kind, columns, grouped=True)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    absent = [name for name in reward.optional if name not in columns]
    if absent:
        text = f"reward {reward.name!r} reads a column `{absent[0]}` if there is one, and {source} has none"
        found.findings.append(Fault("note", text, "rewards"))


def _extensions(recipe: AnyRecipe, trained: Sequence[Reward], scored: Sequence[Reward]) -> None:
    # Without a label, the server of a reward decides its name, so the name is not known here.
    if any(entry.name == "remote" and not entry.label for entry in (*recipe.rewards, *evaluated(recipe))):
        return
    Extensions.of(recipe, [reward.name for reward in trained], [reward.name for reward in scored])


def _trackers(found: Checked) -> None:
    """Check the trackers, because accelerate leaves out trackers that are not installed without a message."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    installed = {str(name) for name in get_available_trackers()}
    for name in found.recipe.run.trackers:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; use some of {', '.join(known)}"
            text = f"run.trackers has {name!r}, which accelerate does not know{hint}"
            found.findings.append(Fault("fault", text, "run.trackers"))
        elif name not in installed:
            text = f"run.trackers has {name!r}, which is not installed: pip install {name}, or leave it out"
            found.findings.append(Fault("needed", text, "run.trackers"))
