"""Writes docs/recipes.md from the schema of recipes, so that the page cannot differ from the code.

Run it from anywhere: `python docs/make_recipe_reference.py`.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flowgrpo.configs.coefficient_schedules import ScheduleConfig
from flowgrpo.configs.image_recipe import TeacherConfig
from flowgrpo.configs.key_meanings import MASKED_NOTES, NOTES, TEXT_NOTES, meaning
from flowgrpo.configs.reward_sections import RewardConfig
from flowgrpo.configs.schema import MaskedRecipe, Recipe, TextRecipe
from flowgrpo.configs.text_recipe import LanguageTeacherConfig
from flowgrpo.parts.choice import Of, default_of, options_model
from flowgrpo.parts.kinds import KINDS, Kind

PAGE = Path(__file__).resolve().with_name("recipes.md")

INTRODUCTION = """\
# Recipes

<!-- Written by docs/make_recipe_reference.py from flowgrpo/configs/. Change those, not this page. -->

A recipe is a YAML file that describes a whole run. `flowgrpo recipes` lists the recipes of the package. `flowgrpo train
RECIPE` takes a name from this list, or the path of your own file. Every key has a default except `rewards` and the name
of each reward, so this is a complete recipe:

```yaml
rewards:
  - name: gold
```

On the command line, keys are set by their dotted names, entries of lists by their numbers from 0, or by their labels or
names. Values are read as YAML.

```sh
flowgrpo train default optimizer.learning_rate=5e-5 rewards.0.options.dense=false "optimizer.betas=[0.9, 0.99]"
```

`flowgrpo plan RECIPE [KEY=VALUE]...` takes the same words. It loads no model. It prints what a run would do: images,
calls of the denoiser, trained steps and optimizer steps, with notes on unusual settings. It ends with exit status 1 if
`train` would refuse to start: prompt files, the model's folder, `model.call`, rewards, their options and columns, and
trackers are checked in the same way. What only a loaded model shows is told by the run: a prompt with too many tokens,
a layer that a LoRA does not find, or a backend of attention that the model does not take. If a recipe of the package
names something that you do not have yet, a line that begins with `needed` says so. A hub id is `not checked`, because
that needs a network. `--draw` adds the rollout tree of one prompt as text, and `--svg FILE` draws it as a picture. If
the plan changes during the run, `--iteration N` chooses the iteration.

A recipe may name another recipe, or a file beside it, as its `base`. It then changes the base key by key: sections are
merged, and lists and values are replaced.

```yaml
base: mixgrpo_guard
name: wider
sampler: {plan: {window: {size: 4}}}
published:
  sampler: {steps: 25}
```

`flowgrpo train wider.yaml` runs this recipe without its `published` section. `flowgrpo train wider.yaml@published` runs
it with that section. The section is a place for a paper's own settings, beside settings for a small machine.

A run folder holds its resolved recipe, with every default written out, as `config.yaml`. That file is a recipe too.

## What is checked

A recipe is checked before a model is loaded, and its faults are listed together. An unknown key is a fault, and the
message names the key that was likely meant. Beyond single values:

- With plan `window`, `rollout.group` is at least 2, and the window fits before the last step of the schedule, which is
  never trained.
- With plans `branch` and `spine`, `sampler.plan.splits` names at least one step of the schedule.
- `optimizer.updates` is at most `rollout.prompts`: an optimizer step takes whole groups.
- A part has its own options and no others. Choosing another part drops the options of the part before.
- `objective.ratio: cps_released` goes only with `sampler.kernel: cps`. With that kernel, `objective.ratio: guard` needs
  `objective.weight: guard`.
- Two rewards must not have the same name; a `label` gives one of them another name.
- `rollout.prompts` is at most the number of training prompts, and at least the number of processes.

## Groups that teach little

If all samples of a prompt have the same reward, their advantages are 0. These lines help, for images and text:

| what to do | lines |
| --- | --- |
| leave them out of the count that the loss is divided by | `select: [varied]` |
| sample more of them, until there are successes and failures | `rollout.budget: {choice: until, rounds: 4}` |
| share samples by what they teach | `rollout.budget: {choice: knapsack}`, or `interval`, `variance` |
| choose prompts by what they teach | `extensions: [curriculum]` |
| compare with more than the group | `advantage: tracked`, or `cumulative`, `anchored`, `virtual_maximum` |
| ask a prompt in several ways | `data.templates: ["{prompt}", "{prompt}, as a photograph"]` |
| put a past success in the place of a failure (text) | `extensions: [{name: replay, keep: 4}]` |

With a budget or templates, `rollout.group` is the size of a round, and a prompt's samples of all rounds are one group.
Each round of images starts from new noise. The metrics then have `rounds` and `samples`.

## Samples that disagree

A reward may say what it read in a sample: the final answer of a completion, the things in a picture, the words on it
([rewards.md](rewards.md#answers)). If the answers to a prompt differ, the model is unsure, and a recipe can use this:

```yaml
rewards:
  - {name: gold, options: {dense: true}}
extensions:
  - {name: uncertainty, reward: gold, alpha: 0.8}
  - {name: curriculum, mix: 0.3, diversity: {reward: gold, weight: 0.25}}
```

The more the answers of a group differ, the smaller extension `uncertainty` makes the advantages (SEED-GRPO). The
`diversity` of `curriculum` draws prompts with such answers more often (MMR1). Samples in which nothing was read do not
count. With `weight: 0` a reward only gives its answers. If the reward gives no answers, an error names it at the first
scoring.

Extension `shaping` adds the scores of a reward, or of one of its sub-scores, to advantages that are already normalised.
It never changes the sign of an advantage (ASPO): a success stays better than a failure, however long it is.

## Coefficients that change

A number of the recipe may change over the run. Each entry of `schedules` moves one of them:

```yaml
base: flow_grpo
name: fading
penalties: [{name: kl, weight: 0.04}]
sampler:
  kernel: {name: flow_sde, eta: 0.9}
schedules:
  - {key: penalties.kl.weight, end: 0.0, over: 200}
  - {key: sampler.kernel.eta, end: 0.5, over: 100, after: 50, shape: cosine}
```

Here the KL fades over 200 iterations, and the noise of the steps begins to fall after 50. These keys can change:

| key | what changes |
| --- | --- |
| `penalties.NAME.OPTION` | the weight or another option of a penalty |
| `objective.OPTION` | an option of the objective, such as the `weight` of a teacher (KDRL) |
| `objective.PART.OPTION` | an option of its surrogate or its loss, such as the bounds of a clip |
| `objective.entropy.value` | text: the coefficient of an entropy bonus without a target |
| `objective.entropy.target` | text: the target that the coefficient of an entropy bonus follows |
| `rewards.NAME.weight` | the weight of a reward: process rewards early, the outcome late (Atom-Searcher) |
| `sampler.kernel.eta` | images: the noise of the stochastic steps |

A value follows from the number of the iteration alone. So an interruption changes nothing, and the length of the run
has no part in it: `over` is a number of iterations, and a longer run begins as a shorter one. The metrics have
each value as `schedule/KEY`, and `flowgrpo plan` prints where each begins and ends. At a weight of 0 a penalty or a
reward is still computed and reported.

The learning rate has schedules of its own, `optimizer.warmup` and `optimizer.schedule`. Other keys are refused, because
they are read once, when the run begins. A coefficient that something else moves is refused, too: bounds that
`objective.balance` finds, the coefficient of an entropy bonus with a target, and the weight of a reward with
`at_least`. With schedules, the objective is made anew in each iteration. So an objective from a file of yours keeps
nothing from one iteration to the next.

## Steps from one state

`credit: anchor` (GiGPO) compares every step a second time, with the steps from the same state. For images, these are
the steps of a tree from the same latent: from the common noise, and at each split of plan `branch`. For text, they are
the tokens after a prefix that completions of a prompt share. If no other sample has the state of a step, the step keeps
the sample's advantage.

## Several rewards

A reward may have further keys besides `weight`:

- `gate`: the reward counts only if another reward is high enough, sample by sample or by the share of the group. Behind
  a closed gate the reward is 0. With `closed: null` it is left out instead, which suits negative rewards.
- `apart: true`: the reward only ranks the samples with an open gate, and makes none of their advantages negative. So a
  short answer beats a long answer, but no right answer is punished for its length.
- `noise`: for a verifier whose rates of error are known.
- `at_least`: makes the reward a constraint. Its weight rises while its mean is below this number. The weight is logged
  as `multiplier/NAME`.

The logged and saved rewards are always the scores that the rewards gave.
"""

TEXT = """\
## Runs of text

With `task: text` a recipe trains a causal language model. It has the sections above except `sampler`, `critic` and
`reference`. The sections below replace sections of the same name. If `data` is left out, it is the embedded arithmetic.
Completions are cut into parts only if there is a section `parts`; see [text.md](text.md#parts-of-completions).
"""

PARTS = """\
## Parts

A recipe chooses parts by name. A name alone means the part with its defaults. Options are written beside the name:

```yaml
sampler:
  solver: dpmpp_2m
  kernel: {name: cps, eta: 0.8}
```

On the command line, `sampler.kernel=cps` chooses another part and drops the options of the part before.
`sampler.kernel.eta=0.8` sets an option of the chosen part. In place of a name, you may give a part of your own, as
`path/to/file.py:name` or `package.module:name`, or a part that an installed package declares as an entry point.
`flowgrpo parts` prints this list.

In a list of parts, `penalties.kl.weight=0.01` sets an option of the entry with that name. If there is no such entry, it
is added. `penalties.kl=null` removes the entry.
"""

MASKED = """\
## Runs of masked language models

With `task: masked` a recipe trains a masked language model, whose completions are unmasked step by step; see
[masked.md](masked.md). It has the sections above except those that are replaced below.
"""


# A section that several keys hold is described only at this key.
HOMES = {"EmaConfig": "optimizer.ema."}


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of the schema with the dotted prefix of its keys, in the order of the schema."""
    if HOMES.get(model.__name__, prefix) != prefix:
        return
    yield prefix, model
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{prefix}{name}.")
        elif (entry := entry_of(field.annotation)) is not None:
            yield from sections(entry, f"{prefix}{name}[].")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, required or optional; None for a plain value."""
    for candidate in (annotation, *(get_args(annotation) if _is_union(annotation) else ())):
        # In Python 3.10, `list[int]` counts as a type.
        if get_origin(candidate) is None and isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def entry_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a list holds; None for a list of other things, and for what is no list."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def allowed(annotation: Any, metadata: list[Any]) -> str:
    """The values that a key takes, in words."""
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        inner = [m for one in inner for m in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return allowed(annotation, [*inner, *metadata])
    if kinds := [m for m in metadata if isinstance(m, Of)]:
        [of] = kinds
        return f"a [{of.kind}](#{KINDS[of.kind].plural.replace(' ', '-')})"
    if _is_union(annotation):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return " or ".join([*(allowed(part, metadata) for part in parts), "`null`"])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if section_of(annotation) is not None:
        return "section"
    if get_origin(annotation) is list or get_args(annotation)[1:] == (...,):
        entry = get_args(annotation)[0]
        kinds = [m for m in get_args(entry) if isinstance(m, Of)]
        entry = get_args(entry)[0] if get_origin(entry) is Annotated else entry
        least = max([getattr(m, "min_length", 0) for m in metadata], default=0)
        bound = "one or more " if least == 1 else f"at least {least} " if least else ""
        if get_origin(entry) is Literal:
            return f"list of {allowed(entry, [])}"
        if kinds:
            plural = KINDS[kinds[0].kind].plural
            return f"list of {bound}[{plural}](#{plural.replace(' ', '-')})"
        return f"list of {bound}{_PLURAL[get_origin(entry) or entry]}"
    if get_origin(annotation) is tuple:
        return "two numbers"
    words = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}.get(annotation, "mapping")
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[key]} {getattr(m, key):g}" for m in metadata for key in signs if hasattr(m, key)]
    return " ".join([words, " and ".join(bounds)]).strip()


_PLURAL = {
    str: "texts", float: "numbers", int: "whole numbers", tuple: "pairs of whole numbers", RewardConfig: "rewards",
    TeacherConfig: "teachers",
    LanguageTeacherConfig: "teachers",
    ScheduleConfig: "schedules",
}  # fmt: skip


def of_kind(kind: Kind) -> str:
    """All parts of a kind with their options.

    Raises:
        ValueError: an option is not described in the docstring of its part.
    """
    rows = [("name", "option", "values", "default", "meaning"), ("---",) * 5]
    for name, part in kind.builtin.items():
        rows.append((f"`{name}`", "", "", "", told_of(part)))
        for option, field in options_model(kind.word, name).model_fields.items():
            if not field.description:
                raise ValueError(f"{kind.word} {name}: its docstring does not say under `Args:` what {option} is")
            values = allowed(field.annotation, field.metadata)
            rows.append(("", f"`{option}`", values, default(field), field.description))
            rows += list(_within(option, field))
    title = kind.plural[0].upper() + kind.plural[1:]
    return f"### {title}\n\nValues of `{kind.key}`. In Python: `{kind.call}`.\n\n{_rows(rows)}\n"


def _within(option: str, field: FieldInfo) -> Iterator[tuple[str, ...]]:
    """A row for each key of an option that is a section, unless the section has a separate table."""
    section = section_of(field.annotation)
    if section is None or section.__name__ in HOMES:
        return
    for key, inner in section.model_fields.items():
        name = f"{option}.{key}"
        yield "", f"`{name}`", allowed(inner.annotation, inner.metadata), default(inner), meaning(name, inner, {})


def told_of(part: Callable[..., Any]) -> str:
    """The first paragraph of a part's docstring, on one line."""
    return " ".join((inspect.getdoc(part) or "").partition("\n\n")[0].replace("``", "`").split())


def default(field: FieldInfo) -> str:
    """The default of a key, written as YAML."""
    if field.is_required():
        return "required"
    value = default_of(field)
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"`{json.dumps(value)}`"


def table(prefix: str, model: type[BaseModel], notes: Mapping[str, str]) -> str:
    """The keys of one section; a section below it has a separate table, and a row here only if it can be absent."""
    rows = [("key", "values", "default", "meaning"), ("---",) * 4]
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner = section_of(field.annotation)
        if inner is field.annotation and inner is not None:
            continue
        value = "section" if inner is not None and field.get_default() is not None else default(field)
        home = HOMES.get(inner.__name__, f"{key}.") if inner is not None else f"{key}."
        words = meaning(key, field, notes) + (f" The keys of `{home.removesuffix('.')}`." if home != f"{key}." else "")
        rows.append((f"`{key}`", allowed(field.annotation, field.metadata), value, words))
    return _rows(rows)


def parts_table(parts: dict[str, Callable[..., Any]], skip: tuple[str, ...]) -> str:
    """Named parts with the options and defaults of their functions, and the first line of their docstrings."""
    rows = [("name", "options and defaults", "what it is"), ("---",) * 3]
    for name, function in parts.items():
        given = [p for p in inspect.signature(function).parameters.values() if p.name not in skip]
        options = ", ".join(f"`{p.name}` {json.dumps(p.default)}" for p in given) or "none"
        rows.append((f"`{name}`", options, (inspect.getdoc(function) or "").splitlines()[0]))
    return _rows(rows)


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _tables(listed: Sequence[tuple[str, type[BaseModel]]], notes: Mapping[str, str], mark: str) -> Iterator[str]:
    known = {f"{prefix}{name}" for prefix, model in listed for name in model.model_fields}
    stale = sorted(set(notes) - known)
    if stale:
        raise ValueError(f"notes on keys that are not in the schema: {', '.join(stale)}; remove them")
    for prefix, model in listed:
        words = (inspect.getdoc(model) or "").strip()
        title = f"`{prefix.removesuffix('.').removesuffix('[]')}`" if prefix else "Top level"
        yield f"{mark} {title}\n\n{words}\n\n{table(prefix, model, notes)}\n"


def page() -> str:
    """The whole page.

    Raises:
        ValueError: a key has no meaning, or a note is about a key that does not exist.
    """
    listed = list(sections(Recipe))
    shared = set(listed)
    of_text = [entry for entry in sections(TextRecipe) if entry[0] and entry not in shared]
    known = {*shared, *of_text}
    of_masks = [entry for entry in sections(MaskedRecipe) if entry[0] and entry not in known]
    parts = [INTRODUCTION, *_tables(listed, NOTES, "##"), TEXT, *_tables(of_text, TEXT_NOTES, "###")]
    parts += [MASKED, *_tables(of_masks, MASKED_NOTES, "###")]
    return "\n".join([*parts, PARTS, *(of_kind(kind) for kind in KINDS.values())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
