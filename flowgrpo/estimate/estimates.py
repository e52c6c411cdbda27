"""Estimates of the memory and time that a recipe needs, from shapes alone; docs/estimates.md explains the method."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..configs.layers import prompts_of_file
from ..configs.schema import Recipe
from ..parts.traits import differentiates, noises_again, saying
from ..training.data import have_pictures, read_prompts
from ..training.distributed.context_groups import context_of
from ..training.distributed.processes import Processes
from ..training.images.images_beside import learned
from ..training.planning import (
    Forecast,
    compares_with_past,
    forecast,
    nfe_of,
    noised_levels,
    renoised_states,
    scouts_evaluations,
    search_passes,
    steps_of,
)
from ..training.prompt_embeddings import SPARE_EMBEDDINGS, kept_prompts, met_at_most
from ..training.teachers import know_more
from . import UTILISATION
from .disk import on_disk
from .memory import SHARDING, Shares, at_once, passing, resting, waiting
from .models import Model, model_of

GIB = 2**30
SAID = 0.005 * GIB
"""Fewest bytes that a table in GiB with two decimals tells from none."""
UNKNOWN_PROMPTS = 10_000
EMBEDDINGS = "prompt embeddings"
MUCH_HOST_MEMORY = 32 * GIB
"""Bytes of embeddings for one GPU from which the lines of an estimate say how there can be fewer."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, its dense bfloat16 peak in 10¹² FLOP/s as its maker gives it, and its memory in GiB.

    The words of `device` are in the name that the driver gives the GPU.
    """

    label: str
    tflops: float
    gib: float
    device: str


GPUS = {
    "h100": Gpu("H100 SXM", 989.4, 80.0, "H100 80GB HBM3"),
    "h200": Gpu("H200 SXM", 989.4, 141.0, "H200"),
    "a100": Gpu("A100 80 GB", 312.0, 80.0, "A100"),
    "l40s": Gpu("L40S", 362.05, 48.0, "L40S"),
    "4090": Gpu("RTX 4090", 165.2, 24.0, "RTX 4090"),
}


def gpu_of(device: str) -> str | None:
    """The key in `GPUS` of the GPU with this name, as the driver gives it; None for any other GPU."""
    if "Laptop" in device:
        return None
    return next((key for key, gpu in GPUS.items() if re.search(rf"\b{gpu.device}\b", device)), None)


@dataclass(frozen=True)
class Estimate:
    """Estimated memory and time of a run, for each of several equal GPUs.

    Attributes:
        gpu, gpus, utilisation: the assumptions.
        sharding: what is distributed over the GPUs, a key of `SHARDING`; None if each GPU has everything.
        context: number of GPUs that evaluate one sample together.
        resting: memory that is in use during the whole iteration, by name, in bytes; gradients only in training.
        passing: memory of phases that follow one another, by name, in bytes.
        start: bytes while the prompts are encoded, before the first iteration.
        waiting: host memory for this GPU, by name, in bytes.
        disk: room in the run folder, by name, in bytes.
        flops: FLOPs of an iteration, by phase, on the GPU with the most work.
        evaluation: FLOPs of an evaluation on the held-out prompts.
        quick: FLOPs of a quick evaluation.
        iterations, evaluations, quick_evaluations: their numbers. A quick evaluation within another one costs nothing.
        prompts_known: whether the numbers of prompts come from the files or from published files of the same name.
        full: whether all weights are trained.
        released: whether the text encoders are released, so that the embeddings of all prompts are kept.
    """

    gpu: Gpu
    gpus: int
    utilisation: float
    sharding: str | None
    context: int
    resting: dict[str, int]
    passing: dict[str, int]
    start: int
    waiting: dict[str, int]
    disk: dict[str, int]
    flops: dict[str, float]
    evaluation: float
    quick: float
    iterations: int
    evaluations: int
    quick_evaluations: int
    prompts_known: bool
    full: bool
    released: bool

    @property
    def peak(self) -> int:
        """Largest number of bytes in use at once."""
        return max(self.start, *at_once(self.resting, self.passing).values())

    @property
    def crowded(self) -> bool:
        """Whether the run needs more memory than the GPU has."""
        return self.peak > self.gpu.gib * GIB

    def seconds(self, flops: float) -> float:
        """Seconds for a number of FLOPs."""
        return flops / (self.gpu.tflops * 1e12 * self.utilisation)

    @property
    def iteration_seconds(self) -> float:
        """Seconds of an iteration, without rewards and without an evaluation."""
        return self.seconds(sum(self.flops.values()))

    @property
    def run_seconds(self) -> float:
        """Seconds of the whole run, with evaluations and without rewards."""
        evaluations = self.evaluations * self.evaluation + self.quick_evaluations * self.quick
        return self.iterations * self.iteration_seconds + self.seconds(evaluations)


def estimate(
    recipe: Recipe,
    gpu: str = "h100",
    gpus: int = 1,
    utilisation: float = UTILISATION,
    prompts: int | None = None,
    sharding: str | None = None,
) -> Estimate:
    """Memory and time of a recipe, without its weights.

    Args:
        recipe: of images or videos.
        gpu: a key of `GPUS`.
        gpus: number of GPUs that share the prompts. With context parallelism, groups of GPUs share them.
        utilisation: fraction of the GPU's peak that is reached, in (0, 1].
        prompts: largest number of training prompts to count if their file does not exist.
        sharding: what a launch distributes over several GPUs, a key of `SHARDING`; FSDP2 leaves an adapter whole.

    Raises:
        ValueError: the GPU, the sharding or the shapes of the pipeline are unknown, or a number is out of range.
    """
    if gpu not in GPUS:
        raise ValueError(f"no figures for the GPU {gpu!r}; use one of {', '.join(GPUS)}")
    if not 0 < utilisation <= 1 or gpus < 1:
        raise ValueError(f"utilisation is {utilisation} and gpus is {gpus}; use a number in (0, 1] and at least 1 GPU")
    context = context_of(recipe)
    if gpus % context:
        raise ValueError(
            f"model.context_parallel is {context}, and {gpus} GPUs cannot be divided into groups of {context}; use a "
            f"multiple of {context} GPUs"
        )
    groups = gpus // context
    if groups > recipe.rollout.prompts:
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} on {gpus} GPUs, but "
            f"{'one GPU makes' if context == 1 else f'{context} GPUs make'} all samples of a prompt; "
            "use fewer GPUs, or more prompts"
        )
    shares = Shares.of(recipe, gpus, sharding)
    pictured, others = _pictured(recipe.data.train), recipe.other_calls
    model, expected = model_of(recipe.model, pictured, others, differentiates(recipe)), forecast(recipe)
    shown = model_of(recipe.as_evaluated.model, pictured, others) if recipe.evaluate.call else model
    share = math.ceil(recipe.rollout.prompts / groups)
    train, known = _prompt_count(recipe.data.train, prompts)
    heldout, heldout_known = _prompt_count(recipe.data.heldout) if recipe.data.heldout else (0, True)
    heldout = min(heldout, recipe.evaluate.prompts or heldout)
    cached = _cached_prompts(recipe, train, heldout, groups) * model.prompt_bytes
    near = min(cached, SPARE_EMBEDDINGS)
    stays = resting(recipe, model, expected, share, shares) | {EMBEDDINGS: near}
    waits = {name: stays.pop(name) for name in waiting(recipe)} | ({EMBEDDINGS: cached - near} if cached > near else {})
    steps = steps_of(recipe, evaluation=True)
    image = steps * shown.branches * shown.evaluation.forward / context + shown.decode_flops
    settings = recipe.evaluate
    few = min(settings.quick.prompts, heldout) if settings.quick else 0
    return Estimate(
        gpu=GPUS[gpu],
        gpus=gpus,
        utilisation=utilisation,
        sharding=shares.name,
        context=context,
        resting=stays,
        passing=passing(recipe, model, shares, shown),
        start=sum(
            stays.get(name, 0) for name in ("denoiser", "VAE", "image encoder", "other networks", "LoRA", "teachers")
        )
        + model.encoders
        + near,
        waiting=waits,
        disk=on_disk(recipe, model, heldout),
        flops=_flops(recipe, model, expected, share, _turns(recipe, groups)),
        evaluation=math.ceil(heldout / groups) * settings.seeds * image,
        quick=math.ceil(few / groups) * settings.seeds * image,
        iterations=recipe.run.iterations,
        evaluations=math.ceil(recipe.run.iterations / settings.every) + 1 if heldout else 0,
        quick_evaluations=_quick_alone(recipe) if few else 0,
        prompts_known=known and heldout_known,
        full=recipe.model.train == "full",
        released=recipe.model.release_text_encoders,
    )


def _pictured(source: str) -> bool:
    """Whether the training prompts have pictures; not so if their file does not exist."""
    try:
        return have_pictures(read_prompts(source, fetch=False), source)
    except ValueError:
        return False


def _quick_alone(recipe: Recipe) -> int:
    """Number of quick evaluations that are not part of an evaluation of all prompts."""
    quick, every = recipe.evaluate.quick, recipe.evaluate.every
    return 0 if quick is None else sum(at % every > 0 for at in range(0, recipe.run.iterations, quick.every))


def _turns(recipe: Recipe, gpus: int) -> int:
    """Number of prompts that are trained one after another in an iteration.

    In each optimizer step, all GPUs wait for the GPU with the most prompts.
    """
    total, updates = recipe.rollout.prompts, recipe.optimizer.updates if recipe.optimizer.cut == "prompts" else 1
    bounds = []
    for rank in range(gpus):
        processes = Processes(rank, gpus)
        bounds.append((0, *processes.cuts(total, updates), len(processes.share(total))))
    return sum(max(own[k + 1] - own[k] for own in bounds) for k in range(updates))


def _flops(recipe: Recipe, model: Model, expected: Forecast, share: int, turns: int) -> dict[str, float]:
    """FLOPs of an iteration on the busiest GPU, by phase; if plans differ over the run, their average."""
    cost, iterations, context = model.evaluation, sum(expected.windows), context_of(recipe)

    def average(name: str) -> float:
        return sum(getattr(c, name) * uses for c, uses in zip(expected.counts, expected.windows)) / iterations

    scouts = recipe.rollout.scouts
    leaves = average("leaves") + (0 if scouts is None else scouts.group)
    sampled = average("evaluations") + scouts_evaluations(recipe)
    states = average("images") * nfe_of(recipe, expected).theta_shared
    others = float(compares_with_past(recipe))
    if saying(recipe, "compares"):
        others += model.reference_branches / model.branches
    others += model.teacher_branches / model.branches
    gradient = cost.forward + cost.backward + (cost.recompute if recipe.model.gradient_checkpointing else 0.0)
    passes = recipe.optimizer.epochs * (gradient + others * cost.forward) + search_passes(recipe) * cost.forward
    if learned(recipe) is not None:
        # In each call that trains states of a prompt, the image beside the prompt is one state more.
        group, batch = recipe.rollout.group, recipe.rollout.batch
        passes += recipe.optimizer.epochs * gradient * math.ceil(group / batch) / group
    # At these states a loss differentiates the rewards, through the decoder.
    differentiated = average("trained_states" if recipe.objective.get("at") == "prediction" else "leaves")
    differentiated *= noised_levels(recipe)[0] if noises_again(recipe) else renoised_states(recipe)
    if (ascents := recipe.objective.get("ascents")) is not None:
        # The first gradient at a state serves the better and the worse target.
        differentiated = average("trained_states") * (2 * ascents - 1)
    return {
        "sampling": share * model.branches * sampled * cost.forward / context,
        "decoding": share * leaves * model.decode_flops,
        "training": turns * (model.branches * states * passes / context + differentiated * model.decode_graph_flops),
    }


def _cached_prompts(recipe: Recipe, train: int, heldout: int, gpus: int) -> int:
    """Largest number of prompts whose embeddings are kept for one GPU."""
    # What a teacher reads of a prompt is kept beside the prompt.
    templates = max(len(recipe.data.templates), 1) + know_more(recipe.model)
    share = math.ceil(heldout / gpus)
    most, penalty = kept_prompts(recipe, heldout), learned(recipe)
    beside = 0 if penalty is None else _prompt_count(penalty["source"])[0]
    if recipe.model.release_text_encoders:
        return met_at_most(recipe, train) * templates + heldout + met_at_most(recipe, beside)
    drawn = math.ceil(recipe.rollout.prompts / gpus) * recipe.run.iterations
    met = min(train, drawn) * templates + share + min(beside, drawn)
    return met if most is None else min(met, most)


def _prompt_count(source: str, most: int | None = None) -> tuple[int, bool]:
    """Number of prompts of a file, or of the published file of the same name; and whether the number is known."""
    try:
        return len(read_prompts(source, fetch=False)), True
    except ValueError:
        known = prompts_of_file(source)
        count = UNKNOWN_PROMPTS if known is None else known
        return (count if most is None else min(count, most)), known is not None


def memory_lines(
    gpu: Gpu,
    resting: Mapping[str, int],
    passing: Mapping[str, int],
    peak: int,
    start: int | None = None,
    waiting: Mapping[str, int] | None = None,
) -> tuple[int, list[str]]:
    """The width of the names, and the lines about memory, aligned; all sizes are in bytes, see `Estimate`."""
    rows = {name: size for name, size in resting.items() if size >= SAID}
    rows |= {f"{name} (one at a time)": size for name, size in passing.items()}
    rows |= {} if start is None else {"while encoding": start}
    hosted = {f"{name} (in host memory)": size for name, size in (waiting or {}).items()}
    width = max(map(len, [*rows, *hosted, "most at once"]))
    return width, [
        "  memory of each GPU, in GiB:",
        *(f"    {name:<{width}}  {gib(size):>8}" for name, size in rows.items()),
        f"    {'most at once':<{width}}  {gib(peak):>8}  of {gpu.gib:g}",
        *(f"    {name:<{width}}  {gib(size):>8}" for name, size in hosted.items()),
    ]


def table(found: Estimate) -> list[str]:
    """The lines of an estimate, aligned."""
    width, memory = memory_lines(found.gpu, found.resting, found.passing, found.peak, found.start, found.waiting)
    kind = "" if found.sharding != "fsdp2" else "full " if found.full else "frozen "
    shared = "" if found.sharding is None else f", {kind}{SHARDING[found.sharding]}"
    shared += "" if found.context == 1 else f", the tokens of each sample on {found.context} of them"
    quick = f", {found.quick_evaluations} quick ones" if found.quick_evaluations else ""
    lines = [
        f"estimate for {found.gpus} × {found.gpu.label}{shared}, from shapes alone; rewards are not counted "
        "(docs/estimates.md)",
        *memory,
        "  room on the disk, in GiB, without samples and gallery:",
        *(f"    {f'{name}/':<{width}}  {gib(size):>8}" for name, size in found.disk.items() if size),
        f"  time, at an assumed {found.utilisation:.0%} of {found.gpu.tflops:g} TFLOP/s:",
        *(f"    {name:<{width}}  {duration(found.seconds(flops)):>8}" for name, flops in found.flops.items()),
        f"    {'iteration':<{width}}  {duration(found.iteration_seconds):>8}",
        f"    {'evaluation':<{width}}  {duration(found.seconds(found.evaluation)):>8}",
        f"    {'run':<{width}}  {duration(found.run_seconds):>8}  {found.iterations} iterations, "
        f"{found.evaluations} evaluations{quick}",
    ]
    if found.waiting.get(EMBEDDINGS, 0) > MUCH_HOST_MEMORY:
        fewer = "model.release_text_encoders: false" if found.released else "a smaller evaluate.prompts"
        lines.append(f"  note: the embeddings of the prompts take much host memory for each GPU; write {fewer}")
    if not found.prompts_known:
        lines.append(f"  note: a prompt file that does not exist was counted as {UNKNOWN_PROMPTS:,} prompts")
    return lines


def gib(size: float) -> str:
    """Bytes as GiB with two decimals; what these would hide is `< 0.01`."""
    return "< 0.01" if 0 < size < SAID else f"{size / GIB:.2f}"


def duration(seconds: float) -> str:
    """A time as text, with two or three digits: 42 ms, 0.42 s, 95 s, 12 min, 31 h, 12 d."""
    if seconds < 0.1:
        return "0 s" if not seconds else f"{1000 * seconds:.2g} ms" if seconds >= 0.001 else "< 1 ms"
    for limit, unit, size in ((1.0, "s", 1), (120.0, "s", 1), (7200.0, "min", 60), (172_800.0, "h", 3600)):
        if seconds < limit:
            number = seconds / size
            return f"{number:.2f} {unit}" if number < 1 else f"{number:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"
