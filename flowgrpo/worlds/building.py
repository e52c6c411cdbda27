"""Build the embedded worlds from scratch: models, learned scorer and prompt files, in one folder."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ..inference.image_samples import model_images
from ..inference.text_inference import recipe_of, text_task
from ..rewards.registry import RewardSpec
from ..rewards.runner import RewardSet
from ..text.model import load_language_model
from ..text.sampling import sample_completions
from ..training.data import columns_of, read_prompts
from ..training.evaluating import evaluation_key
from ..training.folder.run_folder import write_text
from ..training.model_paths import quiet_libraries
from ..training.reporting.clock import Clock
from ..weights.json_files import read_json_object
from .arithmetic.masked_building import COMPLETION, MaskedSettings, build_masked
from .arithmetic.problems import ArithmeticSettings, build_arithmetic, write_problem_files
from .scenes.flow import BuildSettings, continue_flow, train_flow
from .scenes.proxy_training import FULL_STEPS, train_proxy
from .scenes.scene_prompts import SKILLS, write_prompt_files

SAMPLING_STEPS = 10
LARGEST_SEED = 2**62
"""The parts of a build have seeds from the given one on, and every seed must fit into 63 bits."""
RECORD = "build.json"
UNFINISHED = ".unfinished"
Report = Callable[[str], None]
_Settings = TypeVar("_Settings", ArithmeticSettings, MaskedSettings)


@dataclass(frozen=True)
class Measured:
    """Measurements of a build, on held-out prompts with one image each.

    Attributes:
        images: number of scored images.
        gold: mean of the gold reward, in [0, 1].
        gold_error: standard error of this mean; None for a single image.
        gold_by_skill: mean of the gold reward for each skill.
        correlation: Pearson's correlation of proxy and gold reward over the images; None if either is constant.
        correlation_partial: Pearson's correlation of the proxy reward and the gold reward's partial credit.
    """

    images: int
    gold: float
    gold_error: float | None
    gold_by_skill: dict[str, float]
    correlation: float | None
    correlation_partial: float | None


def scaled_settings(seed: int, scale: float) -> BuildSettings:
    """The pipeline's settings, with every length multiplied by `scale` but at least as long as one batch needs."""
    full = BuildSettings(seed=seed)

    def part(length: int, least: int) -> int:
        return max(least, round(scale * length))

    return BuildSettings(
        seed=seed,
        scenes=part(full.scenes, 2 * full.batch),
        vae_steps=part(full.vae_steps, 2),
        steps=part(full.steps, 2),
        warmup=part(full.warmup, 1) if scale < 1 else full.warmup,
        second_steps=part(full.second_steps, 2),
    )


def build_all(out: Path, *, seed: int, scale: float, report: Report) -> None:
    """Build `out/pipeline`, `out/proxy` and `out/data`, and write measurements of them to `out/build.json`.

    `out/denoiser` is the pipeline after its first schedule of flow matching, in full precision.

    Each part gets its name only when it is complete. So the same call after an interruption continues with the part
    that was interrupted, and the pipeline's training continues from a state that is at most `training_states.EVERY`
    steps old. With a scale below 1, fewer held-out images are measured too.

    Args:
        out: a new or empty folder, or the folder of an unfinished build with the same seed and scale.
        seed: seed of all random numbers.
        scale: factor on training steps and scenes; 1 makes the shipped folder.
        report: called with lines of progress.

    Raises:
        ValueError: `out` holds something else or a finished build, `scale` is not positive, or `seed` is negative or
            above `LARGEST_SEED`.
    """
    _check_scale(scale)
    _claim(out, seed, scale)
    settings, scorer_steps = scaled_settings(seed, scale), max(2, round(scale * FULL_STEPS))
    states = out / UNFINISHED
    parts: dict[str, Callable[[Path], object]] = {
        "data": _writing(write_prompt_files),
        "proxy": lambda folder: train_proxy(folder, seed=seed, steps=scorer_steps, report=report),
        "denoiser": lambda folder: train_flow(folder, settings, report, states),
        "pipeline": lambda folder: continue_flow(out / "denoiser", folder, settings, report, states),
    }
    _make(out, parts, report)
    measured = measure(out, share=min(scale, 1.0))
    skills = ", ".join(f"{skill} {value:.2f}" for skill, value in measured.gold_by_skill.items())
    report(f"gold {measured.gold:.3f}{_error(measured.gold_error)} on {measured.images} held-out prompts ({skills})")
    report(
        f"correlation of proxy and gold {_number(measured.correlation)}, and with gold's partial credit "
        f"{_number(measured.correlation_partial)}"
    )
    _record(out, {"seed": seed, "scale": scale, "finished": True, "measured": asdict(measured)})


def build_arithmetic_all(out: Path, *, seed: int, scale: float, report: Report) -> None:
    """Build the embedded language model `out/model` and its problems `out/data`, and measure the model.

    The measurement is written to `out/build.json`.

    Args:
        out: a new or empty folder, or the folder of an unfinished build with the same seed and scale.
        seed: seed of all random numbers.
        scale: factor on training steps; 1 makes the shipped model.
        report: called with lines of progress.

    Raises:
        ValueError: as in `build_all`.
    """
    _build_language(out, seed, scale, report, ArithmeticSettings(), build_arithmetic, measure_arithmetic)


def build_masked_all(out: Path, *, seed: int, scale: float, report: Report) -> None:
    """Build the embedded masked language model `out/model` and its problems `out/data`, and measure the model.

    The measurement is written to `out/build.json`.

    Args:
        out: a new or empty folder, or the folder of an unfinished build with the same seed and scale.
        seed: seed of all random numbers.
        scale: factor on training steps; 1 makes the shipped model.
        report: called with lines of progress.

    Raises:
        ValueError: as in `build_all`.
    """
    _build_language(out, seed, scale, report, MaskedSettings(), build_masked, measure_masked)


def _build_language(
    out: Path,
    seed: int,
    scale: float,
    report: Report,
    full: _Settings,
    build: Callable[[Path, _Settings, Report], object],
    share_answered: Callable[[Path], float],
) -> None:
    """Build a language model with a seed and a share of its full steps, and its problems; then measure it."""
    _check_scale(scale)
    _claim(out, seed, scale)
    settings = replace(full, seed=seed, steps=max(2, round(scale * full.steps)))
    parts: dict[str, Callable[[Path], object]] = {
        "data": _writing(write_problem_files),
        "model": lambda folder: build(folder, settings, report),
    }
    _make(out, parts, report)
    share = share_answered(out)
    report(f"answers {share:.3f} of the held-out problems")
    _record(out, {"seed": seed, "scale": scale, "finished": True, "measured": {"answer": share}})


def measure_masked(out: Path) -> float:
    """Share of the held-out problems that a built masked model answers correctly, with the likeliest tokens."""
    model = str(out / "model")
    recipe = recipe_of(model, [f"generation.tokens={COMPLETION}", f"sampler.steps={COMPLETION}", "rollout.batch=300"])
    rows = read_prompts(str(out / "data" / "heldout.jsonl"))
    task = text_task(model, recipe)
    found = task.evaluation(rows, [evaluation_key(row) for row in rows], Clock(task.device, task.clock_parts))
    right = [text == row.columns["answer"] for text, row in zip(found.samples, rows)]
    return sum(right) / len(right)


def measure_arithmetic(out: Path) -> float:
    """Share of the held-out problems that a built model answers correctly; each token is the likeliest one."""
    language = load_language_model(str(out / "model"))
    rows = read_prompts(str(out / "data" / "heldout.jsonl"))
    prompts = [language.encode(row.text) for row in rows]
    found = sample_completions(
        language, prompts, list(range(len(rows))), [0] * len(rows), max_tokens=6, temperature=0.0
    )
    right = [language.decode(ids) == row.columns["answer"] for ids, row in zip(found.ids, rows)]
    return sum(right) / len(right)


def _make(out: Path, parts: Mapping[str, Callable[[Path], object]], report: Report) -> None:
    """Make the missing parts; each part is in the folder `UNFINISHED`, beside its states, until it is complete."""
    quiet_libraries()
    workplace = out / UNFINISHED
    for name, write in parts.items():
        if (out / name).is_dir():
            report(f"{name}: already complete")
            continue
        workplace.mkdir(exist_ok=True)
        shutil.rmtree(workplace / name, ignore_errors=True)
        write(workplace / name)
        os.replace(workplace / name, out / name)
        shutil.rmtree(workplace)
        report(f"{name}: written to {out / name}")


def _writing(write: Callable[[Path], object]) -> Callable[[Path], object]:
    """A function that makes a folder and then calls `write` with it."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        write(folder)

    return make


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.3f}"


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _record(out: Path, facts: dict[str, object]) -> None:
    write_text(out / RECORD, json.dumps(facts, indent=2) + "\n")


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; give a positive number, 1 for the shipped folder")


def _claim(out: Path, seed: int, scale: float) -> None:
    """Take a new folder, or the folder of the same unfinished build; raise ValueError for any other folder."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed}; give a whole number from 0 to {LARGEST_SEED}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a new folder")
    record = out / RECORD
    if record.is_file():
        facts = read_json_object(record)
        if facts.get("finished"):
            raise ValueError(f"{out} holds a finished build; name a new folder")
        if (facts.get("seed"), facts.get("scale")) != (seed, scale):
            raise ValueError(
                f"{out} holds an unfinished build with seed {facts.get('seed')} and scale {facts.get('scale')}; "
                "continue it with this seed and scale, or name a new folder"
            )
        return
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    _record(out, {"seed": seed, "scale": scale, "finished": False})


def measure(out: Path, share: float = 1.0) -> Measured:
    """Sample held-out prompts with the built pipeline, and score the images by gold and by the built scorer.

    Args:
        out: folder of a build with all its parts.
        share: share of the held-out prompts to use, in (0, 1]; at least four of each skill are used.
    """
    rows = read_prompts(str(out / "data" / "heldout.jsonl"))
    rows = rows[: max(4 * len(SKILLS), round(share * len(rows)))]
    texts, keys = [row.text for row in rows], [evaluation_key(row) for row in rows]
    how = [f"evaluate.steps={SAMPLING_STEPS}", "rollout.batch=32", "rollout.decode_batch=32"]
    images = model_images(str(out / "pipeline"), texts, keys, how)
    rewards = RewardSet([RewardSpec("gold"), RewardSpec("proxy", options={"folder": str(out / "proxy")})])
    scores = rewards.score(images, texts, columns_of(rows))
    gold, proxy = scores.values.double().unbind(1)
    partial = torch.tensor(scores.sub_scores["gold"]["partial"], dtype=torch.float64)
    skills = [row.columns["tag"] for row in rows]
    by_skill = {
        skill: float(gold[[k for k, other in enumerate(skills) if other == skill]].mean())
        for skill in SKILLS
        if skill in skills
    }
    return Measured(
        images=len(rows),
        gold=float(gold.mean()),
        gold_error=float(gold.std() / math.sqrt(len(rows))) if len(rows) > 1 else None,
        gold_by_skill=by_skill,
        correlation=correlation(proxy, gold),
        correlation_partial=correlation(proxy, partial),
    )


def correlation(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Pearson's correlation of two [N] vectors; None if either is constant."""
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return None
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])
