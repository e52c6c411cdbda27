"""`flowgrpo plan`: what a recipe will do and cost, without a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..estimate import UTILISATION
from .loading import loading
from .output import console, output_file, refuse_idle, refuse_without, say
from .recipe_words import RecipeArgument, split
from .trusting import TrustOption, trust_run

if TYPE_CHECKING:
    from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
    from ..training.planning import Forecast
    from ..training.prompts.prompt_rows import PromptRow
    from ..training.recipe_findings import Checked

MOST_SIZES = 12
"""Most sizes of prompts that `plan` lists."""
WINDOWS_SHOWN = 6
"""Windows of trained steps that `plan` lists if there are many; a random subset has a hundred or more."""


def plan(
    words: RecipeArgument = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw the rollout tree of one prompt.")] = False,
    svg: Annotated[Path | None, typer.Option(help="SVG file to draw that tree to.")] = None,
    iteration: Annotated[int, typer.Option(min=0, help="Iteration whose tree is drawn.")] = 0,
    gpu: Annotated[
        str | None,
        typer.Option(help="Card of the estimate: h100, h200, a100, l40s or 4090; by default as in the hardware part."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of cards; by default as in the hardware part.")
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="What is divided among the cards, for the estimate: fsdp2 (full weights and all that belongs to them, "
            "or the frozen weights of a LoRA) or zero2 (gradients and optimizer)."
        ),
    ] = None,
    utilisation: Annotated[float, typer.Option(help="Share of the card's peak speed, for the estimate.")] = UTILISATION,
    against: Annotated[
        str | None,
        typer.Option(
            help="A prompt file, such as the file of an earlier fine-tuning: how many prompts of the recipe are in it."
        ),
    ] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the whole recipe, and nothing else.")] = False,
    trust: TrustOption = False,
) -> None:
    """Print what a recipe will do and cost, without loading a model."""
    with loading():
        from ..configs.layers import machine_of
        from ..configs.load import dump_recipe, load_recipe
        from ..configs.schema import MaskedRecipe, TextRecipe
        from ..training.distributed.context_groups import context_of
        from ..training.recipe_launches import check_ranks, check_shards

    source, overrides = split(words)
    output_file(svg, ".svg")
    of_card = {
        "--gpu": gpu is not None, "--gpus": gpus is not None, "--sharding": sharding is not None,
        "--utilisation": utilisation != UTILISATION,
    }  # fmt: skip
    drawing = {"--draw": draw, "--svg": svg is not None}
    if as_yaml:
        others = {"--iteration": iteration, "--against": against is not None}
        refuse_idle({**of_card, **drawing, **others}, "with --yaml, which prints the recipe and nothing else")
    if not any(drawing.values()):
        refuse_without({"--iteration": iteration}, "--draw or --svg")
    trust_run(trust, [], {source: True})
    recipe = load_recipe(source, overrides)
    if as_yaml:
        return say(dump_recipe(recipe).rstrip("\n"))
    checked = _checked(recipe, source)
    recipe = checked.recipe = _as_trained(recipe)
    # The estimate has words of its own for too few prompts.
    context = context_of(recipe)
    if gpus is not None and gpus <= context * recipe.rollout.prompts:
        check_ranks(recipe, gpus)
    seen = _prompts_seen(against)
    if isinstance(recipe, TextRecipe | MaskedRecipe):
        timed = {name: of_card[name] for name in ("--sharding", "--utilisation")}
        refuse_idle(timed, f"for {recipe.name}: an estimate of text is of memory alone, without shards")
    say(f"{recipe.name}: {recipe.paper or 'no paper named'}")
    if isinstance(recipe, TextRecipe):
        if draw or svg is not None:
            raise ValueError(f"{recipe.name} is a recipe of text, which has no tree of denoising steps to draw")
        _plan_text(recipe)
        _print_text_estimate(recipe, checked, gpu, gpus)
        return _print_findings(checked, seen)
    _print_counts(recipe)
    if isinstance(recipe, MaskedRecipe):
        if draw or svg is not None:
            _draw_tree(recipe, iteration, draw, svg)
        _print_text_estimate(recipe, checked, gpu, gpus)
        return _print_findings(checked, seen)
    _print_sizes(checked)
    if draw or svg is not None:
        _draw_tree(recipe, iteration, draw, svg)
    if gpu is not None or gpus is not None or sharding is not None or recipe.model.path != "scenes":
        machine = machine_of(source)
        card, count = gpu or machine.get("gpu", "h100"), gpus or machine.get("gpus", context)
        if sharding == "fsdp2" and count > 1:
            check_shards(recipe)
        _print_estimate(_of_largest(recipe, checked), card, count, utilisation, machine.get("prompts"), sharding)
    _print_findings(checked, seen)


def _checked(recipe: AnyRecipe, source: str | None) -> Checked:
    """Make the check that every run begins with; files and rewards of a recipe of the package may be missing here.

    Raises:
        ValueError: the recipe has faults; the message has one line for each.
    """
    with loading():
        from ..configs.load import load_recipe
        from ..configs.sections import SPLITS
        from ..training.checking import check

    checked = check(recipe, reads_test=True, fetches=False)
    if checked.texts("fault", "needed") and source is not None and not Path(source.partition("@")[0]).is_file():
        own = load_recipe(source)
        excused = {f"data.{name}" for name in SPLITS if not Path(str(getattr(own.data, name))).exists()}
        excused = {key for key in excused if getattr(own.data, key[5:]) == getattr(recipe.data, key[5:])}
        teachers = getattr(own.model, "teachers", None)
        excused |= {"model.teachers"} if teachers == getattr(recipe.model, "teachers", None) else set()
        penalties = getattr(own, "penalties", None)
        excused |= {"penalties"} if penalties == getattr(recipe, "penalties", None) else set()
        excused |= {"rewards"} if own.rewards == recipe.rewards else set()
        excused |= {"evaluate.rewards"} if own.evaluate.rewards == recipe.evaluate.rewards else set()
        checked.excuse(excused)
    if checked.texts("fault", "needed"):
        checked.require()
    return checked


def _as_trained(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with the rank and the layers of its `model.lora.start`; as it is, if they are not known here."""
    from ..training.lora_start import with_start
    from ..weights.lora_conversion import UnreadBase

    try:
        return with_start(recipe, fetches=False)
    except UnreadBase:
        return recipe


def _prompts_seen(against: str | None) -> tuple[str, list[PromptRow]] | None:
    """A prompt file with which the prompts of the recipe are compared, and its prompts."""
    from ..training.data import read_prompts

    return None if against is None else (against, read_prompts(against, fetch=False))


def _print_overlap(checked: Checked, seen: tuple[str, list[PromptRow]] | None) -> None:
    """Print which prompts are in the file `seen`, and which held-out prompts are close to training prompts."""
    from ..training.prompts.overlap import overlap_lines

    data = checked.data
    if data is None or seen is None:
        return
    pairs = [("training prompts", data.train.rows, *seen), ("held-out prompts", data.heldout, *seen)]
    for name, rows, other, others in (*pairs, ("held-out prompts", data.heldout, "data.train", data.train.rows)):
        for line in overlap_lines(rows, name, others, other) if rows else ():
            say(line)


def _print_findings(checked: Checked, seen: tuple[str, list[PromptRow]] | None) -> None:
    _print_overlap(checked, seen)
    for kind, word in (("excused", "needed"), ("unknown", "not checked"), ("note", "note")):
        for finding in checked.findings:
            if finding.kind == kind:
                say(f"{word}: {finding.text}")


def _print_counts(recipe: Recipe | MaskedRecipe) -> None:
    from ..parts.plugins import with_article
    from ..parts.traits import noises_again
    from ..training.model_paths import sample_noun
    from ..training.planning import (
        budget_line,
        clip_bounds,
        ends_early,
        forecast,
        nfe_of,
        scouts_evaluations,
        scouts_line,
        search_line,
    )
    from ..training.recipe_prompts import given_columns
    from ..training.teachers import taught_lines

    expected, noun = forecast(recipe), sample_noun(recipe)
    say(
        f"{recipe.rollout.prompts} prompts × {expected.images // recipe.rollout.prompts} {noun}s = {expected.images} "
        f"{noun}s an iteration, {recipe.run.iterations} iterations"
    )
    if columns := given_columns(recipe):
        say(f"nothing is sampled: the {noun}s are in the columns {', '.join(columns)} of {recipe.data.train}")
    elif recipe.rollout.chunk is not None:
        say(f"sampled and decoded {recipe.rollout.chunk} prompts at a time; the lines below do not depend on it")
    say(
        f"{expected.optimizer_steps} optimizer step(s) an iteration, {expected.on_policy_steps} of them strictly "
        "on-policy"
    )
    say(_trained(recipe))
    _print_schedules(recipe)
    for taught in taught_lines(recipe):
        say(taught)
    if (line := budget_line(recipe)) is not None:
        say(f"samples come {line}; the other numbers leave rounds out")
    if (line := scouts_line(recipe)) is not None:
        say(line)
        say(
            f"they cost a prompt {scouts_evaluations(recipe)} evaluations, and each of them is decoded and scored by "
            f"every reward; the table below is of the {noun}s alone"
        )
    high, nats = clip_bounds(recipe, None)
    if nats is not None or high is not None:
        say(f"clip: {f'±{nats:g} nats per latent' if nats is not None else f'{high:g} on the mean-reduced ratio'}")
    _print_windows(recipe, expected)
    nfe = nfe_of(recipe, expected)
    what = "model for a completion" if noun == "completion" else f"denoiser for {with_article(noun)}"
    say(
        f"evaluations of the {what} (NFE of the old policy, of θ): ({nfe.old:.3g}, {nfe.theta:.3g}), "
        f"with shared states ({nfe.old_shared:.3g}, {nfe.theta_shared:.3g})"
    )
    if recipe.select and not noises_again(recipe):
        say("trained edges and states are the most: select leaves samples out of the update")
    if ends_early(recipe):
        say("these are the most: a completion that is finished before its last step is not evaluated again")
    if (line := search_line(recipe)) is not None:
        say(f"trained edges: {line}")
    for warning in expected.warnings:
        say(f"note: {warning}")


def _trained(recipe: AnyRecipe) -> str:
    lora = recipe.model.lora
    what = "all weights" if recipe.model.train == "full" else f"a LoRA of rank {lora.rank}, alpha {lora.alpha:g}"
    return f"trains {what}, with a learning rate of {recipe.optimizer.learning_rate:g}"


def _print_schedules(recipe: AnyRecipe) -> None:
    from ..configs.coefficient_schedules import schedule_lines

    for line in schedule_lines(recipe):
        say(line)


def _print_windows(recipe: Recipe | MaskedRecipe, expected: Forecast) -> None:
    """Print the counts of one prompt; for a loss of images, which trains no step, a line with what it trains."""
    from ..parts.traits import noises_again
    from ..training.model_paths import sample_noun
    from ..training.planning import images_line, step_ranges

    rows = [
        {
            "iterations": str(uses),
            "trained steps": step_ranges(counts.trained_steps),
            "evaluations (chains)": f"{counts.evaluations} ({counts.chain_evaluations:>6})",
            "leaves": str(counts.leaves),
            "edges": str(counts.edges),
            "trained edges": str(counts.trained_edges),
            "trained states": str(counts.trained_states),
        }
        for counts, uses in zip(expected.counts, expected.windows)
    ]
    images = recipe.task == "images" and noises_again(recipe)
    columns = [name for name in rows[0] if not (images and name.startswith("trained"))]
    shown = rows if len(rows) == WINDOWS_SHOWN + 1 else rows[:WINDOWS_SHOWN]  # a line about one would save none
    widths = {name: max(len(row[name]) for row in [*shown, {name: name}]) for name in columns}
    if recipe.sampler.plan.get("each") == "prompt":
        say("each prompt draws a window of its own; the table counts the windows as if an iteration were one prompt")
    say("per prompt:" if images else "per prompt, by window of trained steps:")
    for row in ({name: name for name in columns}, *shown):
        say("  " + "  ".join(f"{row[name]:>{widths[name]}}" for name in columns))
    if len(rows) > len(shown):
        rest = expected.windows[len(shown) :]
        say(f"  and {len(rest):,} more windows, in {sum(rest):,} iterations")
    if recipe.task == "images" and images:
        say(f"trained {sample_noun(recipe)}s of a prompt: {images_line(recipe)}")


def _print_sizes(checked: Checked) -> None:
    """Print how many prompts have each size, if prompts have sizes."""
    from ..training.images.prompt_sizes import size_counts

    data = checked.data
    for name, rows in () if data is None else (("training", data.train.rows), ("held-out", data.heldout)):
        counts = size_counts(rows)
        if set(counts) <= {None}:
            continue
        named = [
            f"{'the size of the call' if size is None else f'{size[0]} × {size[1]}'}: {count:,}"
            for size, count in counts.items()
        ]
        more = f", and {len(named) - MOST_SIZES} more sizes" if len(named) > MOST_SIZES else ""
        say(f"{name} prompts by size (height × width): {', '.join(named[:MOST_SIZES])}{more}")


def _of_largest(recipe: Recipe, checked: Checked) -> Recipe:
    """The recipe with the largest size of a prompt as the size of the call, for the estimate of memory."""
    from ..training.images.prompt_sizes import SIDES, largest

    data = checked.data
    size = None if data is None else largest([*data.train.rows, *data.heldout])
    own = [side for name in SIDES if type(side := recipe.model.call.get(name)) is int]
    if size is None or (len(own) == len(SIDES) and math.prod(own) >= math.prod(size)):
        return recipe
    say(f"the estimate is for the largest size of a prompt, {size[0]} × {size[1]}, as if all prompts had it")
    model = recipe.model.model_copy(update={"call": {**recipe.model.call, **dict(zip(SIDES, size))}})
    return recipe.model_copy(update={"model": model})


def _print_estimate(
    recipe: Recipe, gpu: str, gpus: int, utilisation: float, prompts: int | None, sharding: str | None
) -> None:
    with loading():
        from ..estimate.estimates import GPUS, SHARDING, Estimate, estimate, table
        from ..estimate.fitting import crowded_lines
        from ..weights.lora import NoSuchLayer

    def estimated(one: Recipe) -> Estimate:
        return estimate(one, gpu, gpus, utilisation, prompts, sharding)

    try:
        found = estimated(recipe)
    except NoSuchLayer:
        # The run would be refused as well, after its model is loaded.
        raise
    except (ValueError, RuntimeError) as error:
        # A network refuses a size that it cannot take by an error of its own.
        if gpu not in GPUS or not 0 < utilisation <= 1 or sharding not in (None, *SHARDING):
            raise
        return say(f"no estimate of memory and time: {error}")
    for line in (*table(found), *crowded_lines(recipe, found, estimated)):
        say(line)
    if sharding is not None and found.sharding is None:
        say(f"  note: {sharding} changes nothing here: one GPU has everything")


def _print_text_estimate(
    recipe: TextRecipe | MaskedRecipe, checked: Checked, given: str | None, count: int | None
) -> None:
    """Print the estimate of a run of text; for an embedded model only if a card or a number of cards is given."""
    with loading():
        import transformers

        from ..configs.schema import TextRecipe
        from ..estimate.estimates import GPUS
        from ..estimate.language import estimate_text, text_table
        from ..estimate.masked import estimate_masked
        from ..estimate.rendering import with_pipelines
        from ..inference.rendered import painters_of
        from ..training.checking import evaluated, reward_specs
        from ..weights.lora import NoSuchLayer

    if given is None and count is None and recipe.model.path.partition(":")[0] == "arithmetic":
        return
    gpu, gpus = given or "h100", count or 1
    # It warns that fused kernels of recurrent layers are missing, which do not matter without numbers.
    transformers.utils.logging.set_verbosity_error()
    rows = [] if checked.data is None else checked.data.train.rows
    try:
        if isinstance(recipe, TextRecipe):
            found = estimate_text(recipe, rows, gpu, gpus)
        else:
            found = estimate_masked(recipe, rows, gpu, gpus)
        painters = painters_of(reward_specs([*recipe.rewards, *evaluated(recipe)]))
    except NoSuchLayer:
        raise
    except Exception as error:
        if gpu not in GPUS or gpus > recipe.rollout.prompts:
            raise
        # Any model's own code runs on `meta`, and may fail there in any way.
        why = (
            error if isinstance(error, ValueError) else f"the code of the model does not run without weights ({error})"
        )
        return say(f"no estimate of memory: {why}")
    try:
        found = with_pipelines(found, painters)
    except (ValueError, RuntimeError) as error:
        say(f"the pipelines of rendered are not counted: {error}")
    for line in text_table(found):
        say(line)


def _plan_text(recipe: TextRecipe) -> None:
    from ..training.planning import budget_line, parts_line, search_line, teachers_line
    from ..training.recipe_prompts import given_columns

    rollout, optimizer = recipe.rollout, recipe.optimizer
    texts, longest = rollout.prompts * rollout.group, recipe.generation.max_tokens
    say(
        f"{rollout.prompts} prompts × {rollout.group} completions = {texts} completions an iteration, at most "
        f"{longest} tokens each, {recipe.run.iterations} iterations"
    )
    if (line := budget_line(recipe)) is not None:
        say(f"samples come {line}; the other numbers leave rounds out")
    say(f"{optimizer.updates * optimizer.epochs} optimizer step(s) an iteration, 1 of them strictly on-policy")
    say(_trained(recipe))
    _print_schedules(recipe)
    columns, own = given_columns(recipe), recipe.rollout.form.get("own", 0.0)
    if columns:
        there = f"the completions are in the columns {', '.join(columns)} of {recipe.data.train}"
        say(f"{own:.0%} of the prompts are sampled; of the others, {there}" if own else f"nothing is sampled: {there}")
        say(f"at most {texts * longest:,} tokens scored an iteration, {optimizer.epochs} time(s)")
    else:
        say(f"at most {texts * longest:,} tokens sampled an iteration, and scored {optimizer.epochs} time(s)")
    if not columns and recipe.rollout.form.name != "plain":
        say(
            f"these are the numbers of completions from their beginning to their end; form {recipe.rollout.form.short} "
            "may write more of them, or longer ones"
        )
    for found in (search_line(recipe), teachers_line(recipe), parts_line(recipe)):
        if found is not None:
            say(found)


def _draw_tree(recipe: Recipe | MaskedRecipe, iteration: int, draw: bool, svg: Path | None) -> None:
    from rich.text import Text

    from ..configs.schema import Recipe
    from ..samplers.drawing import draw_text, unfold
    from ..samplers.drawing_svg import draw_svg
    from ..training.folder.run_folder import write_text
    from ..training.planning import levels_of, planner

    if iteration >= recipe.run.iterations:
        raise ValueError(f"--iteration is {iteration}; the recipe has iterations 0 to {recipe.run.iterations - 1}")
    tree = unfold(planner(recipe, levels_of(recipe))(iteration))
    # Only a pipeline of images has noise levels of its own.
    unknown = isinstance(recipe, Recipe) and not (recipe.sampler.sigmas or recipe.sampler.shift)
    title, note = f"{recipe.name}, iteration {iteration}", "noise levels without the model's own shift" * unknown
    if draw:
        text = Text("\n" + draw_text(tree, title, note))
        text.highlight_regex("[━╍┕┝]+", "bold orange3")
        console.print(text, end="", soft_wrap=True)
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        write_text(svg, draw_svg(tree, title, note))
        say(f"drawing: {svg}")
