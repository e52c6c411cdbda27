"""Every path from scores to advantages, as a recipe chooses it, on rollouts that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.configs.image_recipe import CriticConfig
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.pipelines.experience import Experience
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import branch_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.text.cutting import Parts
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.credit.from_scores import Credit
from flowgrpo.training.credit.pooling import Batch, pooled
from flowgrpo.training.credit.strata import stratum_of
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions.extension import Extensions
from flowgrpo.training.images.critic import Critic
from flowgrpo.training.reported import as_reported
from flowgrpo.training.tasks import FlowTask
from flowgrpo.training.text.text_policy import Completions

FIVE, FLOW = shifted_sigmas(5, 3.0), Kernel("flow_sde", 0.7)
PROMPTS, GROUP = 3, 4
PLANS = {
    "chains": window_plan(FIVE, [0, 1, 2], FLOW, samples=GROUP, shared_noise=False),
    "probed": window_plan(FIVE, [0, 1, 2], FLOW, samples=GROUP, probe=1, shared_noise=False),
    "tree": branch_plan(FIVE, [0, 1], FLOW, width=2),
    "spine": spine_plan(FIVE, [0, 1], FLOW, branches=GROUP),
}


@dataclass(frozen=True)
class Path:
    """One way from scores to advantages.

    Attributes:
        base: recipe.
        lines: of the recipe that choose it.
        kind: a plan of images, or `text`.
        values: `any` number, `unit` for 0 to 1, or `binary`.
        first: more keys of the first reward.
        second: more keys of the second.
        visits: how often the prompts are seen, for what remembers them.
        weights: of the first two rewards.
    """

    base: str = "mixgrpo_flash_guard"
    lines: tuple[str, ...] = ()
    kind: str = "chains"
    compares: bool = True
    values: str = "any"
    first: str = ""
    second: str = ""
    visits: int = 1
    weights: tuple[float, float] = (0.5, 0.25)

    @property
    def name(self) -> str:
        return "answer" if self.kind == "text" else "gold"

    @property
    def asks(self) -> bool:
        """Whether it asks a reward that is only recorded."""
        return any("reward: g" in line for line in (*self.lines, self.first, self.second))


def _advantage(*lines: str, **more: Any) -> Path:
    return Path(lines=lines, **more)


def _text(*lines: str, **more: Any) -> Path:
    return Path("text", lines, "text", **more)


def _credit(base: str, kind: str, *lines: str) -> Path:
    """A credit that compares by itself."""
    return Path(base, ("advantage=null", *lines), kind, compares=False)


BY_GROUP = "advantage.scale=group"


GATE, CLOSED = "gate: {reward: g}", "gate: {reward: g, closed: null}"
TINY = "advantage.eps=1.0e-12"
PATHS: dict[str, Path] = {
    **{
        f"{baseline}/{scale}/{how}": _advantage(
            f"advantage={{name: {name}, baseline: {baseline}, scale: {scale}"
            # Without a scale only the whitening of gdpo divides.
            + ("}" if (scale, name) == ("none", "group") else ", eps: 0.0}")
        )
        for baseline in ("mean", "loo", "none")
        for scale in ("group", "batch", "none")
        for how, name in (("sum", "group"), ("gdpo", "gdpo"))
    },
    "worst": _advantage(BY_GROUP, "combine=worst"),
    "agreement": _advantage(BY_GROUP, "combine=agreement"),
    "anchored": _advantage("advantage=anchored", TINY),
    "quantile": _advantage("advantage=quantile", TINY),
    "consistency": _advantage("advantage=consistency", TINY),
    "stratified": _advantage("advantage={name: stratified, stratum: {reward: g}}", TINY),
    "virtual_maximum": _advantage("advantage={name: virtual_maximum, maximum: 99.0}"),
    "beta": _advantage("advantage=beta", values="binary", weights=(1.0, 1.0)),
    "tracked": _advantage("advantage={name: tracked, eps: 0.0}", values="unit", visits=2),
    "cumulative": _advantage("advantage={name: cumulative, eps: 0.0}", visits=2),
    "spine": _advantage(BY_GROUP, kind="spine"),
    "tree": _advantage(BY_GROUP, kind="tree"),
    "depth": _credit("branchgrpo", "tree"),
    "depth/path": _credit("branchgrpo", "tree", "credit.fusion=path"),
    "turning": _credit("tp_grpo", "probed", "credit.eps=0.0"),
    "turning/total": _credit("tp_grpo", "probed", "credit.eps=0.0", "credit.main=total"),
    "turning/rest": _credit("tp_grpo", "probed", "credit.eps=0.0", "credit.main=rest"),
    "value": _credit("vgpo", "probed", "credit.eps=0.0"),
    "minimum": _credit("vgpo", "probed", "credit={name: minimum, eps: 0.0}"),
    "soft minimum": _credit("vgpo", "probed", "credit={name: minimum, temperature: 0.5, eps: 0.0}"),
    "critic": Path("ac_flow"),
    "process": Path("euphonium", ("credit.eps=0.0",)),
    "anchor": Path("branchgrpo", (BY_GROUP, "credit={name: anchor, eps: 0.0}"), "tree"),
    "gate": _advantage(BY_GROUP, second=GATE),
    "gate/closed": _advantage(BY_GROUP, second=CLOSED),
    "gate/share": _advantage(BY_GROUP, second="gate: {reward: g, share: 0.5}"),
    "gate/apart": _advantage(BY_GROUP, second="gate: {reward: g, apart: true}"),
    "constraint": _advantage(BY_GROUP, "extensions=[{name: multipliers, initial: 0.5}]", second="at_least: 0.9"),
    "text": _text(),
    "text/length": _text("advantage.baseline=length"),
    "text/unlikely": _text(second="unlikely: 0.5"),
    "text/quantile": _text("advantage=quantile", TINY),
    "text/prefix": _credit("text", "text", "credit={name: prefix, eps: 0.0}"),
    "text/anchor": _text("credit={name: anchor, gamma: 0.9, eps: 0.0}"),
    "text/parts": _credit("text", "text", "credit={name: parts, eps: 0.0}", "parts={cut: lines}"),
    "text/minimum": _credit("text", "text", "credit={name: minimum, eps: 0.0}", "parts={cut: lines}"),
}
"""What of these is no odd function of the rewards, or not of their scale, `test_score_signs.py` says by name."""


@cache
def recipe_of(path: Path, weights: tuple[float, ...]) -> AnyRecipe:
    """Rewards a, b, z for the weights, and where a gate or strata ask it g, of weight 0."""
    more = [path.first, path.second, ""]
    entries = [
        f"{{name: {path.name}, label: {label}, weight: {weight}{', ' if extra else ''}{extra}}}"
        for label, weight, extra in zip("abz", weights, more)
    ]
    if path.asks:
        entries.append(f"{{name: {path.name}, label: g, weight: 0.0}}")
    eps = ["advantage.eps=0.0"] if path.compares else []
    lines = [f"rewards=[{', '.join(entries)}]", *eps, "clamp=null", *path.lines]
    return load_recipe(path.base, lines)


@cache
def rollout_of(kind: str) -> Any:
    """Samples of three prompts, four each (and their previews); completions of one length begin alike."""
    if kind != "text":
        plan = PLANS[kind]
        rollout = RolloutRunner(lambda x, i, p: 0.5 * x, plan, (4, 4, 4)).run(range(PROMPTS))
        samples = torch.zeros(len(rollout.leaf), 3, 1, 1)
        return Experience(rollout, plan, ("",) * PROMPTS, samples, 1, tuple(range(PROMPTS)))
    ids = [[7, row, 3, 4] for _ in range(PROMPTS) for row in (1, 1, 2, 2)]
    parts = Parts([["x", "y"] for _ in ids], [[0, 0, 1, 1] for _ in ids])
    sampled = Sampled(ids, [[-0.1 * (k + 1)] * 4 for k in range(len(ids))], [True] * len(ids))
    owners = [p for p in range(PROMPTS) for _ in range(GROUP)]
    return Completions([[1]] * PROMPTS, sampled, ["x"] * len(ids), owners, parts=parts)


def values_of(path: Path, count: int, seed: int = 0) -> Tensor:
    """[L, count] scores, rounded so that sums of some of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(rollout_of(path.kind).prompt_of_sample), count)
    drawn = torch.randint(0, 17, size, generator=generator) / 16
    if path.values == "binary":
        verdicts = (drawn > 0.4).float()
        if count > 1:  # some prompts have the one reward, others the other
            first = torch.tensor(rollout_of(path.kind).prompt_of_sample) < 2
            verdicts[~first, 0] = verdicts[first, 1] = torch.nan
        return verdicts
    return drawn if path.values == "unit" else 8 * drawn - 3


def batch_of(path: Path, values: Tensor, weights: Sequence[float]) -> RewardBatch:
    """Scores of a, b, z, and g; where parts are scored, that of a part is the sample's and the number of the part."""
    parts, names = {}, tuple("abz"[: values.shape[1]])
    if "parts={cut: lines}" in path.lines:
        parts = {name: [[v, 1.5 * v] for v in column] for name, column in zip(names, values.T.tolist())}
    if path.asks:
        names, weights = (*names, "g"), (*weights, 0.0)
        gate = torch.tensor([1.0, 0.0, 1.0, 1.0]).repeat(len(values))[: len(values), None]
        values = torch.cat([values, gate], 1)
    return RewardBatch(values, names, torch.tensor(list(weights)), {}, {}, {}, parts=parts)


class Odd(Critic):
    """A critic that expects the opposite of opposite rewards, as no network does that has begun somewhere."""

    def values(self, experience: Experience, x: Tensor, sigma: float, prompts: Sequence[int]) -> Tensor:
        return x.flatten(1).mean(1) * (self.mean / self.square**0.5)


def advantages_of(path: Path, values: Tensor, weights: Sequence[float], *earlier: Tensor) -> Tensor:
    """[N] or [N, T] advantages by the path, after as many earlier visits with scores of their own as it remembers."""
    e = rollout_of(path.kind)
    batches = [batch_of(path, one, weights) for one in (*earlier, values)]
    recipe = as_reported(recipe_of(path, tuple(weights)), batches[0].names)
    credit, critic = Credit(recipe), None
    extensions = Extensions.of(recipe, batches[0].names, batches[0].names)
    if path.base in ("ac_flow", "euphonium"):
        critic = Odd(CriticConfig(warmup=0, passes=1), (4, 4, 4), lambda prompt: torch.ones(2), "", seed=3)
        FlowTask.learn(SimpleNamespace(critic=critic), e, batches[-1])  # type: ignore[arg-type]
    rows = [PromptRow(p, f"prompt {p}") for p in range(PROMPTS)]
    for batch in batches:
        everyone = pooled(Processes(), list(range(PROMPTS)), rows, e, batch, stratum_of(recipe.advantage))
        found = credit.advantages(everyone, Batch(list(range(PROMPTS)), rows, e, batch), critic, extensions)
    return found
