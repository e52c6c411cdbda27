"""The model card of a result: a README.md with the head that the hub of Hugging Face reads.

A card says what was trained, how, and with which scores before and after. Of a path of this machine, only the last part
is shown. The program alone has whole paths, so that it runs from any folder; `flowgrpo push` takes them out. The
licence is left to whoever publishes the result.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...configs.coefficient_schedules import schedule_lines
from ...configs.image_recipe import TeacherConfig
from ...configs.schema import AnyRecipe, MaskedRecipe, Recipe
from ...configs.yaml_text import Dumper
from ...parts.traits import compares_rewards, offered, rewarded
from ..teachers import own_teacher
from .card_snippets import RESULT_LINE, result_line, snippet
from .files import write_text
from .leftovers import RESULTS

CARD = "README.md"
FORMER = "README.before.md"
LICENCE = """Nobody has chosen a licence yet. Look at the licence of the base model, choose one, and write it into the
head of this file as `license`."""
EMBEDDED = ("scenes", "arithmetic", "arithmetic:untrained", "arithmetic:masked")
_MARK = re.compile(r"\n<!-- flowgrpo ([0-9a-f]{64}) -->\n\Z")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CardFacts:
    """What a card says about a result and its recipe does not say.

    Attributes:
        kind: `lora`, `pipeline` or `model`: an adapter, a whole pipeline, or a whole language model.
        iteration: iterations after which the weights were taken.
        place: the folder of the result, from the root.
        train, heldout: numbers of prompts; None if they are not known.
        loads_lora: whether the pipeline's class loads a LoRA itself.
        files: names of the result's files.
        call: arguments of the pipeline's call with which the run made its evaluations.
        left_out: components that the base model's folder leaves out.
        video: whether the samples are videos.
        sampling_rate: of sounds, samples a second; None if the samples are no sounds.
        pictures: the arguments of a call that are pictures.
        chat: whether prompts go through a chat template.
        own_class: whether the class of the language model is flowgrpo's, because transformers has none.
        alike_since: the first iteration whose evaluation has the settings of the last one.
        changed: what was changed in the middle of the run, each with its iteration, in words.
    """

    kind: str
    iteration: int
    place: str = "."
    train: int | None = None
    heldout: int | None = None
    loads_lora: bool = True
    files: tuple[str, ...] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    video: bool = False
    sampling_rate: int | None = None
    pictures: tuple[str, ...] = ()
    chat: bool = False
    own_class: bool = False
    alike_since: int = 0
    changed: tuple[str, ...] = ()


def card_text(recipe: AnyRecipe, metrics: Sequence[Mapping[str, Any]], facts: CardFacts) -> str:
    """The text of a card.

    Args:
        recipe: of the run.
        metrics: lines of `metrics.jsonl`, oldest first.
        facts: about the result.
    """
    base, published = base_model(recipe.model.path)
    head = yaml.dump(_head(recipe, facts, base if published else None), Dumper=Dumper, sort_keys=False)
    what = {"lora": "A LoRA for", "pipeline": "The pipeline", "model": "The language model"}[facts.kind]
    done = "" if facts.kind == "lora" else ", with trained weights"
    parts = [
        f"---\n{head}# license: choose one; the licence of the base model may decide which\n---",
        f"# {plain_line(recipe.name)}",
        f"{what} {_base_in_words(recipe, base, published)}{done}. It was trained on {_source(recipe)} by flowgrpo.",
        "## Training\n\n" + "\n".join(_table(_rows(recipe, facts, base))),
        *_scores(recipe, metrics, facts),
        f"## Use\n\n{snippet(recipe, facts, base, published)}",
        f"## Licence\n\n{LICENCE}",
    ]
    return "\n\n".join(parts) + "\n"


def base_model(path: str) -> tuple[str, bool]:
    """The name of a base model without the folders of this machine, and whether it is a name on the hub.

    A folder in the hub's cache has the name of its repository.
    """
    cached = _SNAPSHOT.search(path)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}", True
    if path in EMBEDDED:
        return path, False
    with suppress(OSError):
        if _HUB_ID.fullmatch(path) and not path.startswith(".") and not Path(path).exists():
            return path, True
    name, folder = last_part(path), Path(path)
    # Every run calls its result `pipeline` or `model`, so the name of the run tells more.
    run = name in RESULTS and (folder.parent / "config.yaml").is_file()
    return f"{folder.absolute().parent.name}/{name}" if run else name, False


def last_part(path: str) -> str:
    """The last part of a path, whatever its separators are."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _source(recipe: AnyRecipe) -> str:
    """What the loss of a recipe learns from."""
    given, ranked = offered(recipe, "given"), rewarded(recipe)
    found = ["samples that the data give, and that rewards rank," if given else "rewards"] if ranked else []
    if _teachers(recipe):
        found.append("what its teachers predict" + (" for samples that the data give" if given and not ranked else ""))
    if own_teacher(recipe):
        found.append("what the model itself predicts when it knows more")
    return " and ".join(found or ["penalties alone"])


def _teachers(recipe: AnyRecipe) -> list[str]:
    """The names of the other models that teach, without the folders of this machine."""
    teachers = () if isinstance(recipe, MaskedRecipe) else recipe.model.teachers
    # A teacher of a pipeline without weights of its own is the base with another call. One that knows more is named
    # by `own_teacher`.
    others = [one for one in teachers if not (isinstance(one, TeacherConfig) and one.is_own and one.knows_more)]
    paths = [teacher.path or getattr(teacher, "lora", None) or recipe.model.path for teacher in others]
    return list(dict.fromkeys(plain_line(base_model(path)[0]) for path in paths))


def _base_in_words(recipe: AnyRecipe, base: str, published: bool) -> str:
    if recipe.model.path in EMBEDDED:
        return f"`{base}`, an embedded model of flowgrpo"
    return f"[{base}](https://huggingface.co/{base})" if published else f"`{plain_line(base)}`, a folder"


def _head(recipe: AnyRecipe, facts: CardFacts, base: str | None) -> dict[str, Any]:
    text = not isinstance(recipe, Recipe)
    head: dict[str, Any] = {}
    if base is not None:
        head["base_model"] = base
        head["base_model_relation"] = "adapter" if facts.kind == "lora" else "finetune"
    head["library_name"] = "diffusers" if not text else "peft" if facts.kind == "lora" else "transformers"
    fills = isinstance(recipe, MaskedRecipe) and not facts.own_class
    head["pipeline_tag"] = "fill-mask" if fills else pipeline_tag(text, facts)
    head["tags"] = ["flowgrpo", *(["reinforcement-learning", "grpo"] if compares_rewards(recipe) else [])]
    head["tags"] += ["distillation"] if _teachers(recipe) or own_teacher(recipe) else []
    head["tags"] += ["lora"] if facts.kind == "lora" else []
    return head


def pipeline_tag(text: bool, facts: CardFacts) -> str:
    """The hub's word for what a model does."""
    if text:
        return "image-text-to-text" if facts.pictures else "text-generation"
    made = "audio" if facts.sampling_rate is not None else "video" if facts.video else "image"
    return f"{'image' if facts.pictures else 'text'}-to-{made}"


def _rows(recipe: AnyRecipe, facts: CardFacts, base: str) -> Iterable[tuple[str, str]]:
    lora = recipe.model.lora
    yield "base model", plain_line(base)
    adapted = recipe.model.train == "lora"
    trained = f"a LoRA of rank {lora.rank} and alpha {lora.alpha:g}" if adapted else "all weights"
    if adapted and lora.start is not None:
        trained = f"the LoRA {plain_line(last_part(lora.start))}, further"
    if adapted and facts.kind != "lora":
        trained += ", here added into the weights"
    yield "trained", f"{trained}, computed in {recipe.model.dtype}"
    yield "recipe", plain_line(recipe.name) + (f": {plain_line(recipe.paper)}" if recipe.paper else "")
    yield "objective", _objective(recipe)
    if teachers := _teachers(recipe):
        yield "teachers", ", ".join(teachers)
    if weights := own_teacher(recipe):
        yield "teacher", f"the model itself, with {weights}"
    rewards = ", ".join(_reward(reward) for reward in recipe.rewards)
    yield "rewards", rewards if rewarded(recipe) else f"{rewards}, only reported"
    noun = "completions" if not isinstance(recipe, Recipe) else "sounds" if facts.sampling_rate else "images"
    sampled = f"{recipe.rollout.prompts} prompts × {recipe.rollout.group} {noun}"
    scouts = recipe.rollout.scouts if isinstance(recipe, Recipe) else None
    if scouts is not None:
        sampled += f", whose seeds {scouts.group} scouts a prompt, of {scouts.steps} steps, have chosen ({scouts.keep})"
    yield "iterations", f"{facts.iteration} of {recipe.run.iterations}, each with {sampled}"
    optimizer = recipe.optimizer
    steps = optimizer.updates * optimizer.epochs
    often = "a step" if steps == 1 else f"{steps} steps"
    rate = f"learning rate {optimizer.learning_rate:g} ({optimizer.schedule})"
    name = {"adamw": "AdamW", "adamw_8bit": "AdamW with averages in 8 bits"}[optimizer.type]
    yield "optimizer", f"{name}, {rate}, {often} an iteration"
    if facts.changed:
        yield "changed in the middle", plain_line("; ".join(facts.changed))
    yield "average of the weights", "none" if optimizer.ema is None else f"decay {optimizer.ema.decay:g}"
    if recipe.schedules:
        yield "coefficients that change", plain_line("; ".join(schedule_lines(recipe)))
    yield "seed", str(recipe.run.seed)
    yield "training prompts", _prompts(recipe.data.train, facts.train)
    if recipe.data.heldout is not None:
        each = f", {recipe.evaluate.seeds} samples of each" if recipe.evaluate.seeds > 1 else ""
        yield "held-out prompts", _prompts(recipe.data.heldout, facts.heldout) + each


def _objective(recipe: AnyRecipe) -> str:
    found = recipe.objective
    parts = (found.get("loss"), found.get("surrogate") if rewarded(recipe) else None)
    inner = [one.short for one in parts if one is not None]
    named = f"{found.short} ({', '.join(inner)})" if inner else found.short
    penalties = [f"{one.short} × {one.get('weight'):g}" for one in recipe.penalties if one.get("weight") is not None]
    return plain_line(named + "".join(f", penalty {penalty}" for penalty in penalties))


def _reward(reward: Any) -> str:
    name = plain_line(last_part(reward.label or reward.name))
    return name if reward.weight == 1 else f"{name} × {reward.weight:g}"


def _prompts(file: str, count: int | None) -> str:
    return plain_line(last_part(file)) + ("" if count is None else f" ({count:,})")


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)]


def _scores(recipe: AnyRecipe, metrics: Sequence[Mapping[str, Any]], facts: CardFacts) -> list[str]:
    """The section about scores; nothing if the run made no evaluation."""
    made = [line for line in metrics if any(key.startswith("eval/") for key in line)]
    made = [line for line in made if facts.alike_since <= line["iteration"] <= facts.iteration]
    if not made:
        return []
    before, after = made[0], made[-1]
    names = [key.removeprefix("eval/") for key in after if key.startswith("eval/")]
    rows = [f"| {plain_line(name)} | {_score(before, name)} | {_score(after, name)} |" for name in names]
    text = "Mean over the held-out prompts ± its standard error over prompts, from fixed seeds."
    if isinstance(recipe, Recipe) and recipe.evaluate.trained_share < 1:
        text += (
            f" The trained weights made a share of {recipe.evaluate.trained_share:g} of the steps, and the base model "
            "made the last ones; the program below leaves all steps to the trained weights."
        )
    if after["iteration"] != facts.iteration:
        text += f" The last evaluation was after {after['iteration']} iterations."
    if before["iteration"] != 0:
        text += f" The first evaluation was after {before['iteration']} iterations."
    chosen = names and any(_number(line.get(f"eval/{names[0]}")) is not None for line in made)
    if recipe.evaluate.results == "best" and facts.iteration and chosen:
        text += " The weights were chosen by the first of these rewards, so its score is a little too good."
    table = ["| reward | before | after |", "| --- | --- | --- |", *rows]
    return ["## Scores\n\n" + "\n".join(table) + f"\n\n{text}"]


def _score(line: Mapping[str, Any], name: str) -> str:
    mean, error = _number(line.get(f"eval/{name}")), _number(line.get(f"eval_error/{name}"))
    if mean is None:
        return "–"
    return f"{mean:.4g}" if error is None else f"{mean:.4g} ± {error:.2g}"


def _number(value: Any) -> float | None:
    with suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else None
    return None


def plain_line(text: str) -> str:
    """A text on one line, with nothing in it that a table or a heading would read."""
    return re.sub(r"([|<>`\[\]*])", r"\\\1", " ".join(text.split()))


# -- files -------------------------------------------------------------------------------------------------------------


def former_card(folder: Path) -> str | None:
    """The card of a folder that a person has changed, which must not be lost; None if there is none.

    It may already lie beside a newer card.
    """
    text = _text(folder / CARD)
    if text is None:
        return _text(folder / FORMER)
    mark = _MARK.search(text)
    unchanged = mark is not None and mark[1] == _digest(text[: mark.start()])
    return _text(folder / FORMER) if unchanged else text


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def write_card(folder: Path, text: str, former: str | None = None) -> None:
    """Write a card into the folder of a result. A card that a person had changed is kept beside it."""
    if former is not None:
        write_text(folder / FORMER, former)
    write_text(folder / CARD, _marked(text))


def move_card(folder: Path, place: Path) -> None:
    """Let the card in `folder` say that the result lies in `place`."""
    with suppress(UnicodeDecodeError):  # then a person has written it, and it stays as it is
        text = (folder / CARD).read_text(encoding="utf-8")
        write_text(folder / CARD, placed_card(text, str(place.resolve())))


def placed_card(text: str, place: str) -> str:
    """A card whose program names `place` as the folder of the result."""
    return edited(text, lambda card: RESULT_LINE.sub(lambda _: result_line(place), card))


def edited(text: str, change: Callable[[str], str]) -> str:
    """A card after a change of ours. If no person has changed the card, this stays known."""
    mark = _MARK.search(text)
    if mark is None or mark[1] != _digest(text[: mark.start()]):
        return change(text)
    return _marked(change(text[: mark.start()]))


def _marked(text: str) -> str:
    return f"{text}\n<!-- flowgrpo {_digest(text)} -->\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
