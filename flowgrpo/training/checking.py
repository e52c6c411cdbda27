"""The check of a recipe before a model loads. `flowgrpo plan` and every run make the same check."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..configs.schema import AnyRecipe, Recipe, RewardConfig, TextRecipe
from ..parts.choice import options_model, value_at
from ..parts.traits import trained
from ..pipelines.arguments import argument_faults, size_faults
from ..rewards.base import RESERVED, MissingDependency, Reward, RewardSpec
from ..rewards.registry import outline
from ..text.cutting import Parts
from .balance import Balance
from .credit.from_scores import Credit
from .data import Data, MissingPrompts, PromptRow, PromptStream, columns_of, prompt_path, read_prompts
from .extensions.extension import Extensions
from .images.conditioning import Parameters, call_parameters, take_pictures
from .images.critic import check_guide
from .model_paths import RECOMMENDED, call_arguments, check_folder, language_folder, model_folder, recommended_arguments
from .planning import forecast, planner, setting_of, table_of
from .prompt_lengths import long_prompts
from .text.answer_objective import tried

Kind = Literal["fault", "needed", "excused", "unknown", "note"]


@dataclass(frozen=True)
class Fault:
    """A finding of the check of a recipe.

    Attributes:
        kind: `fault`: the recipe cannot run. `needed`: the recipe cannot run here, because a file or a package is
            missing. `excused`: as `needed`, for a recipe that comes without its files. `unknown`: only a request over
            the network can tell. `note`: the recipe runs, but maybe not as its author thinks.
        text: what is wrong, where, and what to write instead.
        key: the key of the recipe, if the finding is about one key.
    """

    kind: Kind
    text: str
    key: str = ""


@dataclass
class Checked:
    """A recipe after its check.

    Attributes:
        recipe: the checked recipe.
        findings: all findings.
        folder: of the model, or its hub id; "" if there is none.
        data: prompts with their pictures; None if they cannot be read.
    """

    recipe: AnyRecipe
    findings: list[Fault] = field(default_factory=list)
    folder: str = ""
    data: Data | None = None

    def texts(self, *kinds: Kind) -> list[str]:
        """The texts of the findings of some kinds."""
        return [finding.text for finding in self.findings if finding.kind in kinds]

    def excuse(self, keys: Collection[str]) -> None:
        """Excuse missing files and packages of these keys, for a recipe of the package that comes without its files."""
        self.findings = [
            replace(finding, kind="excused")
            if finding.kind == "needed" and finding.key.rstrip("0123456789").rstrip(".") in keys
            else finding
            for finding in self.findings
        ]

    def require(self) -> Data:
        """The data of a recipe that can run.

        Raises:
            ValueError: the recipe cannot run; the message has a line for each fault.
        """
        faults = self.texts("fault", "needed")
        if faults or self.data is None:
            raise ValueError("\n".join(faults))
        return self.data


def check(recipe: AnyRecipe, *, reads_test: bool = False) -> Checked:
    """Check everything that a recipe names: prompt files, model, arguments of its call, rewards and trackers.

    The check reads no weights, makes no reward that could read weights, and uses no network.

    Args:
        recipe: the recipe.
        reads_test: read the test prompts as well. A run does not read them; it only checks that the file is there.
    """
    found = Checked(recipe)
    found.data = _data(found)
    _model(found)
    _combinations(found)
    _rewards(found)
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


def read_data(recipe: AnyRecipe) -> Data:
    """Read the prompt files of a recipe; raises a ValueError that names file and line of a fault."""
    train = read_prompts(recipe.data.train)
    _enough(recipe, train)
    return Data(PromptStream(train, recipe.run.seed), read_heldout(recipe))


def read_heldout(recipe: AnyRecipe) -> list[PromptRow]:
    """The held-out prompts of a recipe, at most `evaluate.prompts`; empty if the recipe names no file."""
    return read_split(recipe, "heldout")


def read_split(recipe: AnyRecipe, split: str) -> list[PromptRow]:
    """The prompts of one of `SPLITS`, at most `evaluate.prompts`; empty if the recipe names no file."""
    source = recipe.data.source(split)
    return read_prompts(source)[: recipe.evaluate.prompts] if source else []


def _try(found: Checked, key: str, check: Callable[..., Any], *given: Any) -> Any:
    """The result of a check; None if the check failed, and then its fault is added to the findings."""
    try:
        return check(*given)
    except MissingDependency as error:
        found.findings.append(Fault("needed", str(error), key))
    except MissingPrompts as error:
        found.findings.append(Fault("needed", str(error), key))
    except (ValueError, OSError) as error:
        found.findings.append(Fault("fault", str(error), key))
    return None


def _data(found: Checked) -> Data | None:
    recipe, rows = found.recipe, {}
    for name in ("train", "heldout"):
        source = getattr(recipe.data, name)
        if source is not None:
            rows[name] = _try(found, f"data.{name}", _prompts, recipe, source)
    train = rows["train"]
    if train is not None:
        _try(found, "rollout.prompts", _enough, recipe, train)
    if None in rows.values():
        return None
    return Data(PromptStream(train, recipe.run.seed), rows.get("heldout", [])[: recipe.evaluate.prompts])


def _test_prompts(found: Checked, reads: bool) -> None:
    """Check that the file of the test prompts is there; if it is to be read, check it like the held-out prompts."""
    recipe, source = found.recipe, found.recipe.data.source("test")
    if source is None:
        return
    if not reads:
        _try(found, "data.test", prompt_path, source)
        return
    rows = _try(found, "data.test", _prompts, recipe, source)
    if rows is None or found.data is None:
        return
    columns = columns_of(rows, _parts_of(recipe))
    for spec in reward_specs(evaluated(recipe)):
        try:
            reward = outline(spec)
        except (ValueError, OSError):
            continue  # The check of the rewards has said what is wrong.
        _try(found, "data.test", _check_reward, found, reward, columns, source)
    _shared(found, rows, source)


def _shared(found: Checked, rows: Sequence[PromptRow], source: str) -> None:
    """Note test prompts that are training or held-out prompts too."""
    for name in ("train", "heldout"):
        other = found.recipe.data.source(name)
        known = {_said(row) for row in read_prompts(other)} if other else set()
        count = sum(_said(row) in known for row in rows)
        if count:
            text = (
                f"{count} of {len(rows)} prompts of {source}, the test prompts, are in data.{name} ({other}) too; take "
                "them out of one of the two, or name another file with data.test"
            )
            found.findings.append(Fault("note", text, "data.test"))


def _said(row: PromptRow) -> str:
    """The words of a prompt or a conversation; texts that differ in spaces alone have equal words."""
    said = [row.text] if row.messages is None else [f"{m['role']}: {m['content']}" for m in row.messages]
    return " ".join(" ".join(said).split())


def _parts_of(recipe: AnyRecipe) -> Parts | None:
    return Parts([], []) if isinstance(recipe, TextRecipe) and recipe.parts is not None else None


def _prompts(recipe: AnyRecipe, source: str) -> list[PromptRow]:
    rows = read_prompts(source)
    reserved = [name for name in RESERVED if any(name in row.columns for row in rows)]
    if reserved:
        raise ValueError(
            f"{source}: the prompts have a column {reserved[0]!r}, which rewards receive anyway; rename it"
        )
    if isinstance(recipe, Recipe):
        refuse_conversations(rows)
    elif recipe.parts is not None:
        columns_of(rows, Parts([], []))
    return rows


def refuse_conversations(rows: Sequence[PromptRow]) -> None:
    """Refuse prompts that are conversations, because pipelines take texts."""
    for row in rows:
        if row.messages is not None:
            raise ValueError(
                f"{row.place}: prompt {row.id + 1} is a conversation ({row.text!r:.80}), which only language models "
                "read; write its words as `prompt`"
            )


def _enough(recipe: AnyRecipe, train: Sequence[PromptRow]) -> None:
    if recipe.rollout.prompts > len(train):
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} but {recipe.data.train} holds {len(train)} prompts; use at "
            f"most {len(train)} or a longer file"
        )


def _model(found: Checked) -> None:
    recipe, path = found.recipe, found.recipe.model.path
    resolve = model_folder if isinstance(recipe, Recipe) else language_folder
    found.folder = _try(found, "model.path", resolve, path) or ""
    if not found.folder:
        return
    if not Path(found.folder).is_dir():
        text = f"model.path {path} is not a folder here, so it is taken for a hub id, which is read when a run starts"
        return found.findings.append(Fault("unknown", text, "model.path"))
    before = len(found.findings)
    _try(found, "model.path", check_folder, found.folder, recipe.task)
    if len(found.findings) == before and isinstance(recipe, Recipe):
        _call(found, recipe)


def _call(found: Checked, recipe: Recipe) -> None:
    """Check the arguments of the pipeline's call, the pictures of prompts, and the lengths of prompts."""
    folder, given = found.folder, recipe.model.call
    parameters = call_parameters(folder)
    if parameters is None:
        return
    advised = _try(found, "model.path", recommended_arguments, folder)
    if advised is None:
        return
    faults = list(call_faults(Path(folder), parameters, given))
    note = f"{Path(folder) / RECOMMENDED}: call."
    faults += argument_faults(parameters, {k: v for k, v in advised.items() if k not in given}, note, "the pipeline")
    found.findings += [Fault("fault", fault, "model.call") for fault in faults]
    if faults:
        return
    call = _try(found, "model.call", call_arguments, folder, given)
    if call is None or found.data is None:
        return
    data = found.data
    _try(found, "data.train", take_pictures, data, recipe, call, parameters)
    for source, rows in ((recipe.data.train, data.train.rows), (recipe.data.heldout, data.heldout)):
        texts = [row.text for row in rows]
        notes = _try(found, "model.path", _long_prompts, folder, str(source), texts, call, parameters)
        found.findings += [Fault("note", note, "data.train") for note in notes or ()]


def _long_prompts(folder: str, source: str, texts: list[str], call: Any, parameters: Parameters) -> list[str]:
    return list(long_prompts(Path(folder), source, texts, call, parameters))


def call_faults(folder: Path, parameters: Parameters, call: Any, place: str = "model.call.") -> Iterator[str]:
    """The faults of the arguments of a pipeline's call."""
    yield from argument_faults(parameters, call, place, "the pipeline")
    yield from size_faults(folder, call, place)


def _combinations(found: Checked) -> None:
    """Check what the schema cannot see: options that a part refuses, and plans that train no step."""
    recipe = found.recipe
    checks: list[Callable[[], Any]] = [lambda: Credit(recipe)]
    balance = value_at(recipe, "objective.balance")
    if balance is not None:
        checks.append(lambda: Balance(balance))
    if isinstance(recipe, Recipe):
        checks.append(lambda: _check_plans(recipe))
    else:
        checks.append(lambda: tried(recipe))
    for one in checks:
        _try(found, "", one)
    if isinstance(recipe, Recipe) and not found.texts("fault"):
        found.findings += [Fault("note", note, "sampler.plan") for note in idle_plan_options(recipe)]


CHECKED_PLANS = 50
"""The check makes the plans of this many iterations."""
COMPARED_PLANS = 2000
"""Runs of more iterations are not searched for options of the plan that have no effect."""


def _check_plans(recipe: Recipe) -> None:
    """Make the plans of the first iterations, and check that the plans fit the objective and the guide."""
    forecast(recipe, most=CHECKED_PLANS)
    plan, wanted = planner(recipe, table_of(recipe))(0), trained(recipe)
    if recipe.sampler.guide is not None:
        check_guide(plan)
    if wanted != "images" and not plan.trained_steps:
        raise ValueError(
            f"sampler.plan {recipe.sampler.plan.name} trains no step, and objective {recipe.objective.name} needs one"
        )
    if wanted == "steps" and plan.neighbours:
        raise ValueError(
            f"sampler.plan {recipe.sampler.plan.name} trains deterministic steps as choices among neighbours; use "
            "objective neighbour, or another plan"
        )


def idle_plan_options(recipe: Recipe) -> list[str]:
    """A sentence for each option of the plan that changes no step of the run.

    Another choice, such as the number of steps, may take the effect of an option away. So the option is reported, and
    not refused.
    """
    count = recipe.run.iterations
    if count > COMPARED_PLANS:
        return []
    chosen, setting = recipe.sampler.plan, setting_of(recipe, table_of(recipe))
    made, found = chosen.make(), []
    for option, known in options_model(chosen.kind, chosen.name).model_fields.items():
        if known.is_required() or known.default is not None or chosen[option] is None:
            continue
        without = replace(chosen, options={**chosen.options, option: None}).make()
        if all(made(setting, k) == without(setting, k) for k in range(count)):
            found.append(f"sampler.plan.{option} changes no step of the {count} iterations")
    return found


def _rewards(found: Checked) -> None:
    recipe, data = found.recipe, found.data
    parts = _parts_of(recipe)
    sides = [
        ("rewards", recipe.rewards, recipe.data.train, data and data.train.rows),
        ("evaluate.rewards", evaluated(recipe), recipe.data.heldout, data and data.heldout),
    ]
    outlines: list[list[Reward | None]] = []
    for key, entries, source, rows in sides:
        specs = reward_specs(entries)
        outlined = [_try(found, f"{key}.{k}", outline, spec) for k, spec in enumerate(specs)]
        outlines.append(outlined)
        made = [reward for reward in outlined if reward is not None]
        _try(found, key, _named_once, made)
        if rows:
            columns = columns_of(rows, parts)
            for reward in made:
                _try(found, key, _check_reward, found, reward, columns, str(source))
    trained, scored = outlines
    if None not in (*trained, *scored):
        _try(found, "extensions", _extensions, recipe, trained, scored)
    found.findings = list({(f.kind, f.text): f for f in found.findings}.values())


def _named_once(rewards: Sequence[Reward]) -> None:
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two rewards are called {twice[0]!r}; give one of them a `label`")


def _check_reward(found: Checked, reward: Reward, columns: dict[str, list[Any]], source: str) -> None:
    kind = "images" if isinstance(found.recipe, Recipe) else "completions"
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
