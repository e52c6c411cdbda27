"""`flowgrpo pipelines`: which diffusers pipelines work as a policy, and whether a given one does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import output_file, refuse_idle, say

if TYPE_CHECKING:
    from ..pipelines.conformance.conform import Result
    from ..pipelines.conformance.subject import CheckOutcome

STEPS, DTYPE = 4, "float32"

pipelines_app = typer.Typer(help="Check diffusers pipelines before training them.", no_args_is_help=True)


@pipelines_app.command("list")
def list_pipelines() -> None:
    """List the pipeline classes with a tiny instance that `check` builds by name."""
    _quiet()
    from ..pipelines.conformance.conform import TINY
    from ..pipelines.conformance.reasons import REASONS
    from ..pipelines.conformance.table import class_of
    from ..weights.pipeline_classes import ADAPTERS

    width = max(map(len, TINY))
    for name in TINY:
        kind = class_of(name)
        adapter = ADAPTERS.get(kind)
        remark = REASONS.get(kind) or (adapter.why if adapter else "")
        say(f"{name:<{width}}  {'not yet: ' if kind in REASONS else ''}{remark}".rstrip())


@pipelines_app.command("check")
def check_pipeline(
    what: Annotated[
        str | None, typer.Argument(help="A pipeline folder, a hub id, or a class of `flowgrpo pipelines list`.")
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE arguments of the pipeline's call; a picture is given by file.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check a tiny instance of every class.")] = False,
    out: Annotated[Path | None, typer.Option(help="--all: JSON file for the results.")] = None,
    page: Annotated[Path | None, typer.Option(help="--all: markdown file for the table.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Denoising steps.")] = STEPS,
    prompt: Annotated[list[str] | None, typer.Option(help="Two or more prompts to check with.")] = None,
    device: Annotated[str | None, typer.Option(help="Device; by default an accelerator if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16.")] = DTYPE,
    pipeline: Annotated[
        str | None, typer.Option(help="Class that loads the folder; by default the class that the folder names.")
    ] = None,
    whole: Annotated[bool, typer.Option("--full", help="Check the gradient of all weights, without adapter.")] = False,
) -> None:
    """Check that a pipeline works as a policy: replay, ratio, gradient, decode, trained weights, memory.

    A folder is checked as it is. For a class, a tiny random instance is built, saved, and loaded by path. The exit
    status is 1 if a check fails.
    """
    of_folder = {
        "--steps": steps != STEPS, "--prompt": prompt, "--device": device is not None, "--dtype": dtype != DTYPE,
        "--full": whole, "--pipeline": pipeline is not None,
    }  # fmt: skip
    if every:
        if what is not None:
            raise ValueError(f"--all checks every class; leave {what!r} out")
        refuse_idle(of_folder, "on tiny instances; it is for the folder of a pipeline")
        return _check_all(out, page)
    if what is None:
        raise ValueError("name a pipeline folder or a class, or give --all")
    if out is not None or page is not None:
        raise ValueError("--out and --page are for --all")
    _quiet()
    from ..pipelines.conformance.conform import TINY, check_folder, check_tiny

    if what in TINY:
        if words:
            raise ValueError(f"{what} is checked as a tiny instance with its own arguments; leave {words[0]!r} out")
        refuse_idle(of_folder, "on a tiny instance; it is for the folder of a pipeline")
        result = check_tiny(what, _say_outcome)
    else:
        _require_pipeline(what)
        result = check_folder(
            what, _call(words or []), _say_outcome,
            steps=steps, prompts=tuple(prompt or ()), device=device, dtype=dtype, whole=whole,
            pipeline=pipeline,
        )  # fmt: skip
    _say_verdict(result)
    if not result.passed:
        raise typer.Exit(1)


def _check_all(out: Path | None, page: Path | None) -> None:
    output_file(out, ".json")
    output_file(page, ".md")
    _quiet()
    import json

    from ..pipelines.conformance.conform import TINY, check_all, lacking
    from ..pipelines.conformance.table import as_json, as_markdown, expected, unchecked
    from ..training.folder.run_folder import write_text

    absent = {name: why for name in TINY if (why := lacking(name))}
    for name, why in absent.items():
        say(f"{'not checked':<11} {name:<48} {why}")
    results = []
    for result in check_all([name for name in TINY if name not in absent], lambda name, outcome: None):
        results.append(result)
        say(f"{result.verdict:<11} {result.name:<48} {result.variant or '':<13} {result.seconds:5.1f} s")
        for outcome in result.outcomes:
            if outcome.status == "fail" and expected(result.name):
                _say_outcome(outcome)
    text = as_json(results)
    for path, content in (
        (out, text),
        (page, as_markdown(json.loads(text)["results"], json.loads(text)["versions"], unchecked())),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, content)
            say(f"written: {path}")
    wrong = [result.name for result in results if result.passed != expected(result.name)]
    if wrong:
        say(f"not as expected: {', '.join(wrong)}")
        raise typer.Exit(1)


def _say_outcome(outcome: CheckOutcome) -> None:
    say(f"{outcome.check:<9} {outcome.status:<14} {outcome.detail}")


def _say_verdict(result: Result) -> None:
    needs = f"; adapter: {result.why}" if result.why else ""
    say(f"{result.name}: {'works' if result.passed else 'does not work'} ({result.seconds:.1f} s){needs}")


def _require_pipeline(what: str) -> None:
    """Raise ValueError, before anything is loaded, for a path or a name that cannot be a pipeline."""
    import difflib

    from ..pipelines.conformance.conform import TINY
    from ..training.model_paths import looks_local

    folder = Path(what)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(f"{what} has no model_index.json; give the folder of a whole diffusers pipeline")
    if folder.is_file():
        raise ValueError(f"{what} is a file; give the folder of a whole diffusers pipeline")
    if not folder.exists() and looks_local(what):
        close = difflib.get_close_matches(what, list(TINY), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{what!r} is no folder, no hub id, and no class of `flowgrpo pipelines list`{hint}")


def _call(words: list[str]) -> dict[str, Any]:
    """Arguments from KEY=VALUE; a value that names a picture file is that picture."""
    from ..configs.yaml_text import parse_yaml_value
    from ..pipelines.arguments import PICTURES
    from ..pipelines.pictures import A_FILE, ENDINGS, Picture

    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not KEY=VALUE; write for example guidance_scale=4")
        if Path(value).suffix.lower() in ENDINGS and "prompt" not in key:
            found[key] = Picture(Path(value), key).read()
        elif key in PICTURES:
            raise ValueError(f"{word!r} names no picture; write {key}=PICTURE, with {A_FILE}")
        else:
            try:
                found[key] = parse_yaml_value(value)
            except ValueError as error:
                raise ValueError(f"{word!r}: {error}") from None
    return found


def _quiet() -> None:
    import warnings

    import diffusers
    import transformers

    # These warnings are about later versions of the libraries.
    warnings.filterwarnings("ignore", category=FutureWarning)
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
