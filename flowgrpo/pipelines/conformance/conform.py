"""Run the checks on a folder, on a class, or on every class that has a tiny instance."""

from __future__ import annotations

import inspect
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from ...weights.json_files import read_json_object
from ...weights.kernel_choice import without_cudnn_attention
from ...weights.pipeline_classes import ADAPTERS
from ...weights.pipeline_folders import check_pipeline_folder, named_pipeline
from ...weights.precision import in_dtype
from ...weights.saving import left_out, local_folder
from ..arguments import argument_faults, pictures_left_out, size_faults, strength_faults
from ..pictures import A_FILE
from .animated import ANIMATED
from .checks import CHECKS
from .conditioned import CONDITIONED
from .controlled import CONTROLLED
from .edited import EDITED
from .images import IMAGES
from .images_more import IMAGES_MORE
from .images_single import IMAGES_SINGLE
from .inpainted import INPAINTED
from .noise_predicting import NOISE_PREDICTING
from .recent import RECENT
from .sounding import SOUNDS
from .subject import TEXTS, CheckOutcome, Failure, NotApplicable, Subject
from .tiny import Tiny, installed
from .videos import VIDEOS

TINY: dict[str, Tiny] = {
    **IMAGES,
    **IMAGES_SINGLE,
    **IMAGES_MORE,
    **RECENT,
    **NOISE_PREDICTING,
    **VIDEOS,
    **CONDITIONED,
    **CONTROLLED,
    **INPAINTED,
    **ANIMATED,
    **EDITED,
    **SOUNDS,
}


@dataclass(frozen=True)
class Result:
    """What the checks found about one pipeline.

    Attributes:
        name: class, and after a comma its configuration; or the folder.
        outcomes: one for each check.
        variant: how states are evaluated, None if no way was found.
        why: what the class needs in addition to the plain call, "" if nothing.
        notes: of the tiny instance.
        seconds: duration of the checks.
    """

    name: str
    outcomes: tuple[CheckOutcome, ...]
    variant: str | None
    why: str
    notes: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(outcome.status != "fail" for outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        """`unmodified`, `adapter` or `not yet`."""
        return ("adapter" if self.why else "unmodified") if self.passed else "not yet"


def check(subject: Subject, name: str, report: Callable[[CheckOutcome], None], notes: str = "") -> Result:
    """Run every check on a pipeline; if the probe fails, the other checks are left out.

    Args:
        subject: the pipeline.
        name: for the result.
        report: called with each outcome as soon as it is known.
        notes: for the result.
    """
    began = time.perf_counter()
    outcomes = []
    for title, function in CHECKS.items():
        outcome = _outcome(title, function, subject)
        if title == "probe" and outcome.status == "fail":
            outcome = replace(outcome, detail=f"{outcome.detail}{_of_pictures(subject)}")
        report(outcome)
        outcomes.append(outcome)
        if title == "probe" and outcome.status == "fail":
            break
    variant = None if subject.denoiser is None else subject.denoiser.variant
    kind = name.partition(",")[0] if subject.denoiser is None else type(subject.denoiser.pipe).__name__
    adapter = ADAPTERS.get(kind)
    seconds = time.perf_counter() - began
    return Result(name, tuple(outcomes), variant, adapter.why if adapter else "", notes, seconds)


def _outcome(title: str, function: Callable[[Subject], str], subject: Subject) -> CheckOutcome:
    try:
        return CheckOutcome(title, "pass", function(subject))
    except NotApplicable as reason:
        return CheckOutcome(title, "not applicable", str(reason))
    except Failure as seen:
        return CheckOutcome(title, "fail", str(seen))
    except torch.OutOfMemoryError as error:
        return CheckOutcome(title, "fail", f"out of memory: {error}; check at a smaller height and width")
    except Exception as error:
        # A pipeline may raise any error, and the other checks must still run.
        place = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return CheckOutcome(title, "fail", f"{type(error).__name__} at {where}: {error}")


def _of_pictures(subject: Subject) -> str:
    """What to say after an error of the first call, if the call takes pictures that it was not given.

    Many classes have None as the default of a picture that they cannot do without.
    """
    names = [] if subject.pipe is None else pictures_left_out(_parameters(type(subject.pipe)), subject.call)
    return f"; if the pipeline needs a picture, write {_asked(names)}" if names else ""


def _asked(names: list[str]) -> str:
    """How pictures are written on the command line."""
    words = " ".join(f"{name}=PICTURE" for name in names)
    return f"{words}, with {A_FILE}"


def _parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    return {} if kind is None else inspect.signature(kind.__call__).parameters


def lacking(name: str) -> str:
    """Why the installed diffusers cannot run a tiny instance, a key of `TINY`; "" if it can."""
    kind, since = name.partition(",")[0], TINY[name].since
    if not hasattr(diffusers, kind):
        return f"diffusers {diffusers.__version__} has no {kind}"
    if not installed(since):
        return f"{kind} needs diffusers {since} or later, and {diffusers.__version__} is installed"
    return ""


def check_tiny(name: str, report: Callable[[CheckOutcome], None]) -> Result:
    """Build a tiny instance of a class, save it, load it by path, and check the loaded pipeline.

    Args:
        name: key of `TINY`.
        report: called with each outcome.

    Raises:
        ValueError: the installed diffusers does not have the class, or is too old for it.
    """
    tiny = TINY[name]
    if why := lacking(name):
        raise ValueError(f"{why}; install a newer one (pip install --upgrade diffusers), or check another pipeline")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "pipeline"
        tiny.fresh().save_pretrained(saved)
        subject = Subject(tiny.loaded, saved, tiny.call, tiny.steps, Path(folder), tiny.batch, tiny.texts or TEXTS)
        return check(subject, name, report, tiny.notes)


def check_folder(
    path: str,
    call: Mapping[str, Any],
    report: Callable[[CheckOutcome], None],
    *,
    steps: int = 4,
    prompts: tuple[str, ...] = (),
    device: str | None = None,
    dtype: str = "float32",
    whole: bool = False,
    pipeline: str | None = None,
) -> Result:
    """Check the pipeline in a folder, or of a hub id.

    Args:
        path: what `DiffusionPipeline.from_pretrained` takes.
        call: keyword arguments of the pipeline's call.
        report: called with each outcome.
        steps: denoising steps, at least 2.
        prompts: two or more texts; without any, `TEXTS` are used.
        device: None means an accelerator if there is one.
        dtype: of the weights, by its name in torch.
        whole: give every weight of the denoiser a gradient, not only an adapter.
        pipeline: the class that loads the folder; by default the class that the folder names.

    Raises:
        ValueError: fewer than 2 steps, exactly one prompt, an unknown dtype or device, a damaged folder, or wrong
            arguments.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}; the checks compare two noise levels, so use 2 or more")
    if len(prompts) == 1:
        raise ValueError("one prompt was given; the checks compare prompts, so give two or more, or none")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}; use float32, bfloat16 or float16")
    without_cudnn_attention()
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device is {device!r}; use cpu, cuda, or cuda:1 for the second of several") from None
    if Path(path).is_dir():
        known = check_pipeline_folder(Path(path), pipeline)
        taken = _parameters(known)
        faults = [] if known is None else list(argument_faults(taken, call, "", known.__name__))
        if faults := [*faults, *strength_faults(taken, call, ""), *size_faults(Path(path), call, "")]:
            raise ValueError("\n".join(faults))
    source = local_folder(path)
    owner = pipeline or str(read_json_object(Path(source) / "model_index.json").get("_class_name"))
    loader: Any = DiffusionPipeline if pipeline is None else named_pipeline(pipeline, "the pipeline is ")
    if names := pictures_left_out(_parameters(getattr(diffusers, owner, None)), call, needed=True):
        raise ValueError(f"{path}: {owner} needs a picture; write {_asked(names)}")

    def load(folder: str | Path) -> Any:
        return loader.from_pretrained(folder, **in_dtype(kind), **left_out(str(folder)))

    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(
            load, source, call, steps, Path(folder), texts=prompts or TEXTS, device=chosen, dtype=kind, whole=whole,
        )  # fmt: skip
        return check(subject, path, report)


def check_all(names: list[str], report: Callable[[str, CheckOutcome], None]) -> Iterator[Result]:
    """Check tiny instances one after another.

    Args:
        names: keys of `TINY` that are not `lacking`.
        report: called with a name and each of its outcomes.
    """
    for name in names:
        yield check_tiny(name, partial(report, name))
