"""The rewards of UniRL by the names of ours."""

from __future__ import annotations

from typing import Any

from .conversion import Conversion
from .foreign_settings import named
from .reward_names import CLIP, NEEDS_A_SERVER, ON_GPU, READS_DIFFERENTLY, SERVER, Counterpart, entry_of

RUBRIC = {"rubric": "hpsv3_rubric.txt"}
NEEDS_A_RUBRIC = "`options.rubric` is a file that you write, as docs/rewards.md shows"
FIRST_FRAME = "the middle frame here, the first frame there"
ANSWER = "the column of right answers is `answer`, as there"
OF_CLASSES: dict[str, Counterpart] = {
    "ClipRewardScorer": Counterpart(
        "clip_score", {**CLIP, "logit_scaled": True}, scale=1 / 30, note="their score is the logit divided by 30"
    ),
    "HPSv2RewardScorer": Counterpart("hpsv2", ON_GPU),
    "HPSv3RewardScorer": Counterpart(
        "hpsv3", {**RUBRIC, "divisor": 15.0, **ON_GPU}, needs=NEEDS_A_RUBRIC, note="divided by 15, as there"
    ),
    "ImageRewardScorer": Counterpart(
        "imagereward", ON_GPU, scale=1 / 4, note="their score is (score + 2) / 4; the 1/2 cancels in a group"
    ),
    "MathVerifyRewardScorer": Counterpart("math", note=ANSWER),
    "MathBoxedRewardScorer": Counterpart("math", {"extract": "marked"}, note=ANSWER),
    "GSM8KExactMatchRewardScorer": Counterpart("answer", {"extract": "last_number"}, note=ANSWER),
    "OCRRewardScorer": Counterpart("ocr", note=READS_DIFFERENTLY),
    "PickScoreRewardScorer": Counterpart("pickscore", ON_GPU),
    "VideoPickScoreScorer": Counterpart("pickscore", {"frames": 1, **ON_GPU}, note=FIRST_FRAME),
}  # fmt: skip
"""Their scorer -> our reward."""
OF_SERVER: dict[str, Counterpart] = {
    "clip": Counterpart("clip_score", CLIP),
    "hpsv2": Counterpart("hpsv2", ON_GPU),
    "hpsv3": Counterpart("hpsv3", {**RUBRIC, **ON_GPU}, needs=NEEDS_A_RUBRIC),
    "imagereward": Counterpart("imagereward", ON_GPU),
    "ocr": Counterpart("ocr", note=READS_DIFFERENTLY),
    "pickscore": Counterpart("pickscore", ON_GPU),
    "unified_reward": Counterpart("unified_reward", SERVER, needs=NEEDS_A_SERVER),
}  # fmt: skip
"""Their names of rewards of a server -> our reward."""
AT = "reward.backend."


def rewards(conversion: Conversion) -> None:
    """The reward, or the rewards of a server with their weights."""
    settings, notes = conversion.settings, list[str]()
    kind = (settings.text(f"{AT}_target_") or "").rpartition(".")[2]
    if kind == "RemoteRewardBackend":
        entries, keys = _remote(conversion, notes)
    else:
        entry = entry_of(conversion, kind.removesuffix("RewardScorer") or "reward", OF_CLASSES.get(kind), 1.0, notes)
        keys = [f"{AT}_target_"]
        if settings.has(f"{AT}config.batch_size") and entry["name"] in ("pickscore", "clip_score", "hpsv2"):
            entry["options"]["batch_size"] = settings.count(f"{AT}config.batch_size")
            keys.append(f"{AT}config.batch_size")
        entries = [entry]
    conversion.carry(keys, "rewards", entries, "; ".join(notes))


def _remote(conversion: Conversion, notes: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    settings, at = conversion.settings, f"{AT}config."
    names = settings.texts(f"{at}required_rewards") or []
    weights = {key: settings.number(key) or 0.0 for key in settings.given if key.startswith(f"{at}reward_weights.")}
    kind = settings.text(f"{at}aggregation_method") or "weighted_sum"
    entries = []
    for name in names or ["reward"]:
        weight = weights.get(f"{at}reward_weights.{name}", 1.0) if kind == "weighted_sum" else 1.0
        entries.append(entry_of(conversion, name, OF_SERVER.get(name.lower()), weight, notes))
    if kind in ("min", "max"):
        conversion.lose(
            f"{at}aggregation_method", "rewards are added up; `combine` has other ways, see docs/rewards.md"
        )
    notes.append("scored in the run here; a reward of your own server is `remote`")
    for key in ("base_url", "timeout", "sub_metric_reduce"):
        if settings.has(f"{at}{key}"):
            conversion.ignore(f"{at}{key}", f"the scorers of {named('required_rewards')} run here")
    return entries, [f"{at}required_rewards", *weights, f"{at}aggregation_method"]
