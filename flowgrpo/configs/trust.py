"""What the recipe of a run folder would run and send, and whether this user of this machine has trusted it.

A recipe that you name is your own program. The `config.yaml` of a run folder may be somebody else's program, and nobody
looks into it before `flowgrpo resume`. So everything that it would run or send must be known here: because you have
trained with it, or because you have said `--trust` once. Otherwise the command ends with a list, and nothing is
imported. A recipe with nothing but parts of the package needs no trust.

A thing is known with all its options, so a reward of yours is not called with the options of a stranger. The number of
iterations, weights, options of the package's own parts, and everything else may change freely. Code is known by the
path of its file or by its content. So a run can go on after you have changed your reward, and after you have moved
your project; only after both at once it asks again. Code that lies within the run folder is known by its content only,
because it comes with the folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..intake import ledger
from ..intake.visible import on_one_line
from ..parts.kinds import KINDS
from ..parts.plugins import entry_points, source_of
from .prompt_source import HUB
from .yaml_text import parse_yaml

CONFIG = "config.yaml"
"""Name of a recipe in a run folder and in a checkpoint."""
PLAIN = ("name", "paper", "task", "data", "model", "run", "published", "generation", "parts", "transform", "clamp")
"""Keys of a recipe at which no part and no reward stands."""
PARTS_OF_FORMS = ("tool",)
"""Options of the package's forms of rollouts that are parts. The other options are numbers and texts for the policy."""
OF_DATA, TEXTS_OF_DATA = "data", ("source", "column")
"""The package's penalty on images of data, and its options whose texts name data, and no part."""
NAMING = ("name", "judge", "correct", "reward")
"""Keys of a reward and of the package's own rewards at which a reward is named."""
JUDGES = (
    "remote",
    "artifacts",
    "checklist",
    "critique",
    "judge",
    "judge_logprob",
    "quiz",
    "rubric",
    "unified_reward",
    "verifier",
)
"""Rewards of the package that ask a server."""
MOST = 10


@dataclass(frozen=True)
class Act:
    """One thing that a recipe would run or send.

    Attributes:
        says: what it would do, in words.
        keys: digests; the act is known if one of them is known.
    """

    says: str
    keys: tuple[str, ...]


def config_file(source: str) -> Path | None:
    """The file that a source of a recipe names, if it is the `config.yaml` of a run or a checkpoint; else None."""
    for place in (source, source.partition("+")[0].removesuffix("@published"), source.removesuffix("@published")):
        file = Path(place)
        if file.is_file():
            return file if CONFIG in (file.name.lower(), file.resolve().name.lower()) else None
    return None


def check_acts(file: Path, recipe: Mapping[str, Any], rewards: bool = True) -> None:
    """Refuse the recipe of a run folder that would run or send something unknown to this machine.

    Args:
        file: the recipe.
        recipe: its keys.
        rewards: whether the command makes the rewards.

    Raises:
        ValueError: something is unknown; the message lists everything that is.
    """
    unknown = [act for act in acts(recipe, file.resolve().parent, rewards) if not any(map(ledger.trusted, act.keys))]
    if unknown:
        listed = "".join(f"\n  - {on_one_line(act.says)}" for act in unknown[:MOST])
        more = f"\n  - and {len(unknown) - MOST} more" if len(unknown) > MOST else ""
        raise ValueError(
            f"{file} names things that this machine has not used before. It would{listed}{more}\n"
            "If you trust whoever made the run, add --trust once (bench: `flowgrpo plan "
            f"{file} --trust`); otherwise take these out of the recipe"
        )


def trust_acts(file: Path, recipe: Mapping[str, Any], rewards: bool = True) -> str | None:
    """Remember everything that the recipe of a run folder would run or send; see `ledger.trust` for what it returns."""
    found = acts(recipe, file.resolve().parent, rewards)
    return ledger.trust({key: act.says for act in found for key in act.keys}) if found else None


def remember_run(folder: Path, config: str) -> str | None:
    """Remember what a new run of this user runs and sends; see `ledger.trust` for what it returns."""
    recipe = parse_yaml(config, str(folder / CONFIG))
    return trust_acts(folder / CONFIG, recipe) if isinstance(recipe, dict) else None


def acts(recipe: Mapping[str, Any], folder: Path, rewards: bool = True) -> list[Act]:
    """Everything that a recipe would run or send, other than code of the package.

    Args:
        recipe: its keys, as YAML has them.
        folder: the folder of the recipe.
        rewards: whether to list rewards too.
    """
    look = _Look(folder, _installed_rewards(), _installed_parts())
    found = list(_of_models(recipe))
    found += _of_data(recipe) if rewards else ()
    for key, section in recipe.items():
        if key in PLAIN:
            continue
        if key == "rewards":
            found += look.rewards(section) if rewards else ()
        elif key == "evaluate" and isinstance(section, Mapping):
            found += look.rewards(section.get("rewards")) if rewards else ()
            found += look.parts({name: value for name, value in section.items() if name != "rewards"})
        elif key == "rollout":
            found += look.form(section.get("form") if isinstance(section, Mapping) else section)
        elif key == "penalties" and isinstance(section, list):
            found += look.parts([_without_data(entry) for entry in section])
        else:
            found += look.parts(section)
    return list({act.keys: act for act in found}.values())


def _installed_rewards() -> dict[str, str]:
    return {point.name: f"{point.module}:{point.attr}" for point in entry_points("flowgrpo.rewards")}


def _installed_parts() -> dict[str, str]:
    """Names of parts that installed packages declare -> their code; a name of the package itself means its own part."""
    kinds = {kind.group: kind for kind in KINDS.values()}
    return {
        point.name: f"{point.module}:{point.attr}"
        for point in entry_points(*kinds)
        if point.name not in kinds[point.group].builtin
    }


def _of_models(recipe: Mapping[str, Any]) -> Iterator[Act]:
    """Code that libraries would fetch or run for a model."""
    model, generation = (recipe.get(key) for key in ("model", "generation"))
    attention = model.get("attention") if isinstance(model, Mapping) else None
    if isinstance(attention, str) and (attention.endswith("_hub") or re.search("[/:]", attention)):
        yield _act(f"run code of the hub for model.attention {attention}", ["attention", attention])
    options = generation.get("engine_options") if isinstance(generation, Mapping) else None
    if options:
        yield _act(f"give the sampling engine the options {_short(options)}", ["engine_options", options])


def _of_data(recipe: Mapping[str, Any]) -> Iterator[Act]:
    """Data sets that would be downloaded. Only commands that make rewards download prompts."""
    data, penalties = recipe.get("data"), recipe.get("penalties")
    values = list(data.values()) if isinstance(data, Mapping) else []
    values += [one.get("source") for one in penalties if _names_data(one)] if isinstance(penalties, list) else []
    for value in values:
        if isinstance(value, str) and value.startswith(HUB):
            name = value.removeprefix(HUB).partition("?")[0]
            yield _act(f"download the data set {_short(name)} from the hub", ["data set", name])


@dataclass(frozen=True)
class _Look:
    """Finds what rewards and parts would run and send.

    Attributes:
        folder: folder of the recipe.
        installed_rewards, installed_parts: names that installed packages declare -> their code.
    """

    folder: Path
    installed_rewards: Mapping[str, str]
    installed_parts: Mapping[str, str]

    def rewards(self, section: Any) -> Iterator[Act]:
        """Acts of a list of rewards."""
        for entry in section if isinstance(section, list) else [section]:
            if isinstance(entry, Mapping):
                entry = {key: entry.get(key) for key in ("name", "options")}
            words = list(_words(entry, "name"))
            names = [text for key, text in words if key in NAMING and _is_code(text, self.installed_rewards)]
            if names:
                yield self._running([self.installed_rewards.get(name, name) for name in names], "reward", entry)
            if isinstance(entry, Mapping):
                yield from _sending(entry, words)

    def parts(self, section: Any) -> Iterator[Act]:
        """Acts of the parts in a section, each with its own options."""
        if isinstance(section, str) and _is_code(section, self.installed_parts):
            yield self._running([self.installed_parts.get(section, section)], "part", section)
        elif isinstance(section, list):
            for entry in section:
                yield from self.parts(entry)
        elif isinstance(section, Mapping):
            name = section.get("name")
            if isinstance(name, str) and _is_code(name, self.installed_parts):
                own = {key: value for key, value in section.items() if key != "weight"}
                yield self._running([self.installed_parts.get(name, name)], "part", own)
            for key, value in section.items():
                if key != "name":
                    yield from self.parts(value)

    def form(self, section: Any) -> Iterator[Act]:
        """Acts of a form of rollouts. A text for the policy may look like code, and is none."""
        if isinstance(section, Mapping) and section.get("name") in KINDS["form"].builtin:
            section = {key: value for key, value in section.items() if key in PARTS_OF_FORMS}
        yield from self.parts(section)

    def _running(self, names: list[str], kind: str, entry: Any) -> Act:
        files = [source_of(name) for name in names]
        paths = [str(file) for file in files]
        contents = [_content(file) for file in files]
        keys = [ledger.digest(["content", entry, contents])]
        if not any(file is not None and file.is_relative_to(self.folder) for file in files):
            keys.append(ledger.digest(["path", entry, paths]))
        said = " and ".join(_with_file(name, file) for name, file in zip(names, files))
        options = entry.get("options") if isinstance(entry, Mapping) else None
        with_options = f" with the options {_short(options)}" if options else ""
        return Act(f"run the {kind} {said}{with_options}", tuple(keys))


def _with_file(name: str, file: Path | None) -> str:
    """The name of a piece of code, and where its file is; a person may only stand in the wrong directory."""
    if file is None:
        return name
    place = [] if str(file) in name else [str(file)]
    missing = [] if file.exists() else ["there is no such file; relative paths start at the working directory"]
    return f"{name} ({': '.join(place + missing)})" if place or missing else name


def _names_data(entry: Any) -> bool:
    """Whether an entry of `penalties` is the package's own penalty on images of data."""
    return isinstance(entry, Mapping) and entry.get("name") == OF_DATA


def _without_data(entry: Any) -> Any:
    """An entry of `penalties` without the texts that name data."""
    if not _names_data(entry):
        return entry
    return {key: value for key, value in entry.items() if key not in TEXTS_OF_DATA or not isinstance(value, str)}


def _is_code(name: str, installed: Mapping[str, str]) -> bool:
    """Whether a name makes something be imported that is not of the package; a wrong name may do so as well."""
    return ":" in name or name.endswith(".py") or name in installed


def _sending(entry: Mapping[str, Any], words: list[tuple[str, str]]) -> Iterator[Act]:
    """What a reward sends, and the completions that it would run without a box."""
    places = [text for key, text in words if key == "url" or "://" in text]
    secrets = [text for key, text in words if key.endswith("_env")]
    asked = any(key in NAMING and text in JUDGES for key, text in words)
    if places or secrets or asked:
        where = ", ".join(dict.fromkeys(places)) or "the address that it names"
        with_secrets = f" and the environment variable {', '.join(dict.fromkeys(secrets))}" if secrets else ""
        yield _act(f"send prompts and samples{with_secrets} to {where}", ["send", entry])
    if _unsafe(entry):
        yield _act("run what the model writes, without a box (unsafe)", ["unsafe", entry])


def _unsafe(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any((key == "unsafe" and inner) or _unsafe(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_unsafe, value))


def _words(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a value, with the key at which it stands; texts of a list have the key of the list."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner, key)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _words(inner, str(name))


def _act(says: str, thing: list[Any]) -> Act:
    return Act(says, (ledger.digest(thing),))


def _content(file: Path | None) -> str:
    try:
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _short(value: Any, most: int = 200) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]} …"
