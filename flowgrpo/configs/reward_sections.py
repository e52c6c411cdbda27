"""The rewards of a recipe, and what each of them needs from the other rewards and from the rest."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ..parts.needs import Need, unused
from ..parts.section import Section
from ..parts.traits import offered
from .reading_soundness import reward_place

_OWN_SCALE = "compares a reward by a scale of its own"


class GateConfig(Section):
    """The gate of a reward: the reward counts only where another reward is high enough."""

    needs = (
        Need("combine", ("sum",), _OWN_SCALE, unless="apart"),
        Need("credit", ("leaf",), _OWN_SCALE, unless="apart"),
        Need("advantage", ("group",), _OWN_SCALE, unless="apart"),
        # A part without this option is not advantage `group`, and then the need above already fails.
        Need("advantage.baseline", ("mean", None), _OWN_SCALE, unless="apart", mend="use advantage.baseline mean"),
        Need("advantage.scale", ("group", None), _OWN_SCALE, unless="apart", mend="use advantage.scale group"),
    )

    reward: str = Field(description="Label (or name) of the other reward.")
    at_least: float = Field(0.5, description="Least value of the other reward that opens the gate (G-RA, 2508.10548).")
    closed: float | None = Field(
        0.0, description="The reward behind a closed gate; `null` leaves it out of the statistics."
    )
    share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Open the gate for a whole group if at least this share of it has that value (ConciseR).",
    )
    apart: bool = Field(
        False,
        description="Compare this reward only among the samples with an open gate, by its own scale. The reward "
        "then makes no advantage negative (DRPO, 2510.04474).",
    )

    @model_validator(mode="after")
    def _of_single_samples(self) -> GateConfig:
        if self.apart and self.share is not None:
            raise ValueError(
                "the gate has `share`, which opens it for whole groups, and `apart`, which is for single samples; "
                "leave one of them out"
            )
        if self.apart and (faults := unused(self, ["closed"], "apart leaves the reward out behind a closed gate")):
            raise ValueError("; ".join(faults))
        return self


class NoiseConfig(Section):
    """Error rates of a verifier that gives 0 or 1; its rewards are corrected to be right on average."""

    false_positive: float = Field(0.0, ge=0, lt=1, description="Share of wrong samples that pass.")
    false_negative: float = Field(0.0, ge=0, lt=1, description="Share of right samples that fail.")

    @model_validator(mode="after")
    def _tells_something(self) -> NoiseConfig:
        if self.false_positive + self.false_negative >= 1:
            raise ValueError(
                "false_positive and false_negative add up to 1 or more, so a verdict carries no information; use rates "
                "with a sum below 1"
            )
        return self


def _asks_another(recipe: Any, reward: RewardConfig) -> list[str]:
    """The need of a gate: the other reward must exist."""
    if reward.gate is None:
        return []
    asked = reward_place(recipe.rewards, reward.gate.reward)
    if asked is not None and recipe.rewards[asked] is not reward:
        return []
    others = ", ".join(other.known_as for other in recipe.rewards if other is not reward) or "none, so add one"
    return [f"the gate of reward {reward.known_as} asks for {reward.gate.reward!r}; the other rewards are {others}"]


def _is_weighed(recipe: Any, reward: RewardConfig) -> list[str]:
    """The need of a constraint: an extension must find its weight."""
    if reward.at_least is None or offered(recipe, "multipliers"):
        return []
    return [
        f"reward {reward.known_as} has `at_least`, and nothing finds its weight; add {{name: multipliers}} to "
        "extensions"
    ]


def _stands_apart(recipe: Any, reward: RewardConfig) -> list[str]:
    """The needs of a reward with `gate.apart`, and of the rewards beside it."""
    if not reward.apart:
        return []
    counted, name = [other for other in recipe.rewards if other.weight != 0], reward.known_as
    apart = [other for other in counted if other.apart]
    if len(apart) > 1:
        named = ", ".join(other.known_as for other in apart)
        return [f"gate.apart is for one reward only, and {named} have it; leave it out of all but one"]
    if len(counted) == 1:
        return [
            f"gate.apart adds reward {name} to the advantages of the other rewards, and they all have weight 0; give "
            "one of them another weight"
        ]
    return [
        f"gate.apart compares reward {name} by a scale of its own, and reward {other.known_as} has `at_least`; leave "
        "one of them out"
        for other in counted
        if other.at_least is not None
    ]


class RewardConfig(Section):
    """One reward: a registry name, an entry point, `file.py:name`, or `module:name`."""

    @model_validator(mode="before")
    @classmethod
    def _is_a_mapping(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(f"a reward has several keys; write {{name: {given}}} in place of {given}")
        return given

    needs = (
        _asks_another,
        _is_weighed,
        _stands_apart,
        Need(
            "task", ("text",), "takes how likely a sample was", unless="unlikely",
            mend="leave it out: the density of an image's Gaussian steps depends on the size of their noise, not on "
            "how likely the policy finds the image",
        ),
    )  # fmt: skip

    name: str = Field(min_length=1)
    weight: float = 1.0
    label: str | None = Field(None, min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    time_limit: float | None = Field(
        None,
        gt=0,
        description="Seconds that one call of the reward may take. A longer call ends the run and keeps its samples. "
        "By default there is no limit.",
    )
    noise: NoiseConfig | None = Field(None, description="Error rates of a verifier; by default there are none.")
    gate: GateConfig | None = Field(None, description="By default the gate is always open.")
    unlikely: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Text: share of the reward that the likeliest success of a prompt loses; the least likely success "
        "loses nothing (Rewarding the Unlikely, 2506.02355). The paper uses 0.25.",
    )
    at_least: float | None = Field(
        None,
        description="Makes the reward a constraint: its mean should be at least this, and extension `multipliers` "
        "finds its weight in place of `weight` (Faithful GRPO, 2604.08476).",
    )

    @property
    def known_as(self) -> str:
        """The label of the reward, or its name if it has no label."""
        return self.label or self.name

    @property
    def apart(self) -> bool:
        """Whether the reward is compared only among the successes of another reward."""
        return self.gate is not None and self.gate.apart

    @property
    def bent(self) -> list[str]:
        """Keys that change the values of the reward before samples are compared."""
        return [key for key in ("noise", "gate", "unlikely", "at_least") if getattr(self, key) is not None]

    @model_validator(mode="after")
    def _counts(self) -> RewardConfig:
        if self.weight == 0 and self.bent:
            raise ValueError(
                f"reward {self.known_as} has weight 0, so it is only recorded as it is, and `{self.bent[0]}`, which "
                "changes how it counts; leave one of them out"
            )
        if self.weight < 0 and self.apart:
            raise ValueError(
                f"reward {self.known_as} is compared among successes (gate.apart) with weight {self.weight:g}; use a "
                "weight above 0, and change the sign of the reward where less is better"
            )
        return self


def distinct_labels(rewards: list[RewardConfig]) -> list[RewardConfig]:
    labels = [reward.known_as for reward in rewards]
    if "total" in labels:
        raise ValueError("a reward is called total, as the weighted sum in the metrics is; give it another `label`")
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ValueError(f"two rewards are called {', '.join(repeated)}; give one a `label`")
    return rewards


def one_counts(rewards: list[RewardConfig]) -> list[RewardConfig]:
    """The rewards, of which at least one must have a weight other than 0.

    Raises:
        ValueError: if all rewards have weight 0.
    """
    if all(reward.weight == 0 for reward in rewards):
        raise ValueError(
            f"every reward has weight 0 ({', '.join(reward.known_as for reward in rewards)}), so rewards are only "
            "recorded and nothing is optimised; give one a weight above 0, or below 0 where less of it is better"
        )
    return rewards
