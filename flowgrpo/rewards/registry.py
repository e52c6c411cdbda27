"""Names of rewards, and how a name becomes a scorer.

A name is looked up among rewards registered in this process, the built-in ones, and the entry points of
group `flowgrpo.rewards` of installed packages, in this order. `path/to/file.py:name` and
`package.module:name` need no registration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch.nn import Module

from ..parts import plugins
from ..parts.docstrings import described
from ..parts.foreign import contained
from ..parts.plugins import describe, entry_points, first_line, nearest, told
from .base import RESERVED, Reward, RewardSpec, missing_dependency, parameters, require
from .time_limit import TimeLimit

ENTRY_POINT_GROUP = "flowgrpo.rewards"

BUILTIN: dict[str, str] = {
    "aesthetic": "flowgrpo.rewards.models.aesthetic:Aesthetic",
    "answer": "flowgrpo.rewards.text.answer:Answer",
    "artifacts": "flowgrpo.rewards.judges.judge_artifacts:Artifacts",
    "checklist": "flowgrpo.rewards.judges.judge_checklist:Checklist",
    "choices": "flowgrpo.rewards.models.choices:Choices",
    "clap": "flowgrpo.rewards.models.clap:Clap",
    "clip_score": "flowgrpo.rewards.models.clip_score:ClipScore",
    "code": "flowgrpo.rewards.sandbox.code:Code",
    "confidence": "flowgrpo.rewards.text.confidence:Confidence",
    "critique": "flowgrpo.rewards.judges.judge_critique:Critique",
    "digit_share": "flowgrpo.rewards.text.digit_share:digit_share",
    "equations": "flowgrpo.rewards.text.equations:Equations",
    "geneval": "flowgrpo.rewards.models.geneval:Geneval",
    "given": "flowgrpo.rewards.given:Given",
    "gold": "flowgrpo.worlds.scenes.gold:Gold",
    "hpsv2": "flowgrpo.rewards.models.hpsv2:HpsV2",
    "hpsv3": "flowgrpo.rewards.models.hpsv3:HpsV3",
    "image_classifier": "flowgrpo.rewards.models.image_classifier:ImageClassifier",
    "image_similarity": "flowgrpo.rewards.models.image_similarity:ImageSimilarity",
    "imagereward": "flowgrpo.rewards.models.imagereward:ImageReward",
    "jpeg_compressibility": "flowgrpo.rewards.models.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "flowgrpo.rewards.models.jpeg:JpegIncompressibility",
    "json_output": "flowgrpo.rewards.text.json_output:JsonOutput",
    "judge": "flowgrpo.rewards.judges.judge:Judge",
    "judge_logprob": "flowgrpo.rewards.judges.judge_logprob:JudgeLogprob",
    "length": "flowgrpo.rewards.text.length:Length",
    "loudness": "flowgrpo.rewards.models.loudness:Loudness",
    "majority": "flowgrpo.rewards.text.majority:Majority",
    "math": "flowgrpo.rewards.text.math_answer:MathAnswer",
    "ocr": "flowgrpo.rewards.models.ocr:Ocr",
    "paint": "flowgrpo.worlds.scenes.paint:Paint",
    "person": "flowgrpo.rewards.person.person:Person",
    "pickscore": "flowgrpo.rewards.models.pickscore:PickScore",
    "proxy": "flowgrpo.worlds.scenes.proxy_scorer:Proxy",
    "psnr": "flowgrpo.rewards.models.likeness:Psnr",
    "quiz": "flowgrpo.rewards.judges.judge_quiz:Quiz",
    "reactions": "flowgrpo.rewards.models.reactions:Reactions",
    "relative": "flowgrpo.rewards.relative:Relative",
    "remote": "flowgrpo.rewards.remote:Remote",
    "rendered": "flowgrpo.inference.rendered:Rendered",
    "rubric": "flowgrpo.rewards.judges.judge_rubric:Rubric",
    "safety": "flowgrpo.rewards.models.image_classifier:Safety",
    "siglip": "flowgrpo.rewards.models.siglip:Siglip",
    "sql": "flowgrpo.rewards.sandbox.sql:Sql",
    "ssim": "flowgrpo.rewards.models.likeness:Ssim",
    "text_format": "flowgrpo.rewards.text.text_format:TextFormat",
    "tool_match": "flowgrpo.rewards.text.tool_match:ToolMatch",
    "tool_thrift": "flowgrpo.rewards.text.tool_thrift:ToolThrift",
    "unified_reward": "flowgrpo.rewards.judges.judge_unified:UnifiedReward",
    "verifier": "flowgrpo.rewards.judges.judge_verifier:Verifier",
    "videoalign": "flowgrpo.rewards.models.videoalign:VideoAlign",
    "vqascore": "flowgrpo.rewards.models.vqascore:VqaScore",
    "win_rate": "flowgrpo.rewards.win_rate:WinRate",
}

LIGHT = frozenset(
    {"answer", "equations", "given", "gold", "majority", "paint", "psnr", "ssim", "text_format", "tool_match"}
)
"""Built-in classes whose constructor reads no weights and asks no server. An instance can be made just to check its
options."""
NEEDS = {"math": ("math_verify",), "ocr": ("rapidocr", "onnxruntime")}
"""Packages that the constructors of built-in classes import."""

_REGISTERED: dict[str, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def register(name: str) -> Callable[[F], F]:
    """Return a decorator that gives a reward function or class a name in this process.

    Raises:
        ValueError: the name is empty, has a ":", or belongs to another reward.
    """
    if not name or ":" in name:
        raise ValueError(f'{name!r} cannot name a reward; use a word such as "sharpness"')
    if name in BUILTIN:
        raise ValueError(f"reward {name!r} is built in; register yours under another name")

    def keep(reward: F) -> F:
        old = _REGISTERED.get(name)
        if old is not None and _identity(old) != _identity(reward):
            raise ValueError(f"reward {name!r} is already registered by {_identity(old)}; choose another name")
        _REGISTERED[name] = reward
        return reward

    return keep


def available() -> dict[str, str]:
    """Return the first line of the docstring of every named reward, by name and sorted by name.

    Source files are parsed, not imported. So a listing is cheap, and it does not fail if a package is not installed.
    For a reward without a docstring, the description is `module:name`.
    """
    found = {point.name: describe(f"{point.module}:{point.attr}") for point in entry_points(ENTRY_POINT_GROUP)}
    found.update({name: describe(target) for name, target in BUILTIN.items()})
    for name, reward in _REGISTERED.items():
        found[name] = first_line(inspect.getdoc(reward)) or _identity(reward)
    return dict(sorted(found.items()))


def resolve(name: str) -> Callable[..., Any]:
    """Return the function or class of a name, `path/to/file.py:name` or `package.module:name`.

    Raises:
        ValueError: there is no such name, file, module or attribute; the message lists the known ones. Or a file or
            module has it, but it is no reward.
        MissingDependency: the reward's module imports a package that is not installed.
    """
    try:
        found = plugins.resolve(name, "reward", {**BUILTIN, **_REGISTERED}, ENTRY_POINT_GROUP)
    except ModuleNotFoundError as error:
        raise missing_dependency(name, error) from error
    if ":" in name:
        _refuse_others(found, name)
    return found


MARKS = ("images", "sounds", "completions", "prompts", "parts", "first")
"""Parameters by which a reward is told from any other code: each reward, and each judge of pairs, takes one of them."""


def _refuse_others(found: Any, name: str) -> None:
    """Refuse code that is no reward before anything calls it: its options could do harm.

    What the named file itself defines is not looked at, because the whole file is code of its author, and has run.

    Raises:
        ValueError: no parameter of its call is one that rewards have.
    """
    plugins.refuse_library(found, name, "reward")
    file = plugins.module_of(name.rpartition(":")[0])
    if file is not None and plugins.home_of(found) == file:
        return
    called = [found]
    if isinstance(found, type):
        method = "forward" if issubclass(found, Module) else "__call__"
        # Every class can be called itself, and only a class with the method has instances that can.
        called = [getattr(found, word) for word in (method, "compare") if any(word in vars(k) for k in found.__mro__)]
    if not any(mark in (parameters(one) or {}) for one in called for mark in MARKS):
        raise ValueError(
            f"{name!r} is no reward: it takes none of {', '.join(MARKS[:-1])}; name a function such as "
            "`def score(images, prompts, **columns)`, or a class whose `__call__` is like that"
        )


def build(spec: RewardSpec) -> Reward:
    """Make the reward of one recipe entry: construct a class with its options, or bind a function's options.

    Raises:
        ValueError: the name cannot be resolved, or an option is unknown or missing.
        MissingDependency: the reward needs a package that is not installed.
    """
    if spec.time_limit is None:
        scorer, name, bound = construct(spec)
        return Reward(scorer, name, spec.weight, bound)
    limit = TimeLimit(spec.time_limit, spec.label or spec.name)
    # Some objects, such as database connections, may be used only in the thread in which they were made.
    scorer, name, bound = limit.unlimited(partial(construct, spec))
    return Reward(scorer, name, spec.weight, bound, limit=limit)


def outline(spec: RewardSpec) -> Reward:
    """Return a reward for checks, made from its entry and its signature alone.

    No instance of a class is made, because the constructor could read weights. If its instances differ in the
    attributes that a reward may carry, or in `__signature__`, a static method `outlined(options)` of the class says
    what an instance has.

    Raises:
        ValueError: as for `build`, or the instances of the class cannot be called.
        MissingDependency: as for `build`.
    """
    target, short = checked(spec), spec.name.rpartition(":")[2]
    if not isinstance(target, type) or spec.name in LIGHT:
        return build(spec)
    own = getattr(target, "name", None)
    name = spec.label or (own if isinstance(own, str) and own else short)
    found = _Outline(target, name)
    vars(found).update(_asked(target, "outlined", spec.options) or {})
    return Reward(found, name, spec.weight)


def checked(spec: RewardSpec) -> Callable[..., Any]:
    """Return the function or class of an entry, after a check of its options that makes no instance.

    A class may have a static method `check_options(name, options)`, which raises ValueError for options that need no
    weights and no server to be seen as wrong.

    Raises:
        ValueError: the name cannot be resolved, or an option is unknown, missing or wrong.
        MissingDependency: as for `build`.
    """
    target, short = resolve(spec.name), spec.name.rpartition(":")[2]
    try:
        for module in NEEDS.get(spec.name, ()):
            require(module)
    except ModuleNotFoundError as error:
        raise missing_dependency(short, error) from error
    check_options(target, spec.options, spec.label or short)
    if isinstance(target, type) and callable(check := getattr(target, "check_options", None)):
        check(spec.label or short, spec.options)
    return target


def servers(spec: RewardSpec) -> list[str]:
    """The servers that a reward asks, in words, for an entry that is `checked`; none of them is asked here.

    A class says them with a static method `served_at(options)`.
    """
    return list(_asked(resolve(spec.name), "served_at", spec.options) or ())


def hub_ids(spec: RewardSpec) -> list[str]:
    """The models that a reward reads from the hub when a run starts, for an entry that is `checked`.

    A class says them with a static method `hub_ids(options)`.
    """
    return list(_asked(resolve(spec.name), "hub_ids", spec.options) or ())


def _asked(target: Any, name: str, options: Mapping[str, Any]) -> Any:
    """What a static method of a class says of options; None if there is no such method."""
    own = inspect.getattr_static(target, name, None) if isinstance(target, type) else None
    return own.__func__(options) if isinstance(own, staticmethod) else None


def sketch(target: Callable[..., Any], name: str) -> Reward:
    """The reward that a function or class would make, for questions about its signature; no options are needed.

    Raises:
        ValueError: the instances of the class cannot be called.
    """
    return Reward(_Outline(target, name) if isinstance(target, type) else target, name)


class _Outline:
    """A stand-in for an instance of a reward's class, with the signature and the plain attributes of the class."""

    def __init__(self, target: Any, name: str) -> None:
        if not any("__call__" in vars(kind) for kind in target.__mro__):
            raise ValueError(
                f"reward {name!r} is a class whose instances cannot be called; "
                "give it `__call__(self, images, prompts, **columns)`"
            )
        found = parameters(target.forward if issubclass(target, Module) else target.__call__)
        if found is not None:
            self.__signature__ = inspect.Signature(list(found.values())[1:])
        for attribute in ("whole_group", "remote", "batch_size"):
            value = getattr(target, attribute, None)
            if not isinstance(value, property) and not callable(value):
                setattr(self, attribute, value)

    def __call__(self) -> None:
        raise TypeError("an outline is never called")


def construct(spec: RewardSpec) -> tuple[Any, str, Mapping[str, Any]]:
    """Return the callable from which `build` makes a reward, its name, and the options to bind to its call.

    Raises:
        ValueError: the name cannot be resolved, or an option is unknown or missing.
        MissingDependency: the reward needs a package that is not installed.
    """
    target = resolve(spec.name)
    short = spec.name.rpartition(":")[2]
    check_options(target, spec.options, spec.label or short)
    if isinstance(target, type):
        try:
            with contained():
                scorer: Any = target(**spec.options)
        except ModuleNotFoundError as error:
            raise missing_dependency(short, error) from error
        except Exception as error:
            # Rewards of the package explain what is wrong, except for options of a type that they did not expect.
            ours = target.__module__.startswith("flowgrpo.")
            if ours and not isinstance(error, TypeError | AttributeError | RuntimeError):
                raise
            raise ValueError(f"reward {spec.label or short!r} cannot be made: {told(error)}") from error
        bound: Mapping[str, Any] = {}
    else:
        scorer, bound = target, spec.options
    own = getattr(scorer, "name", None)
    return scorer, spec.label or (own if isinstance(own, str) and own else short), bound


def check_options(target: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Refuse unknown options, and missing options of a class. The message names the nearest known option.

    Raises:
        ValueError: an option is unknown or missing.
    """
    found = parameters(target)
    if found is None:
        return
    construct = isinstance(target, type)
    named = [
        p for p in found.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in RESERVED
    ]
    known = [p.name for p in named]
    anything = any(p.kind is p.VAR_KEYWORD for p in found.values())
    # A function's **columns are columns of the prompt file. A misspelt option must not be taken for one of them.
    unknown = [key for key in options if key not in known and not (anything and construct)]
    if unknown:
        raise ValueError(
            f"reward {name!r} has no option {unknown[0]!r}{nearest(unknown[0], known)} "
            f"Options: {', '.join(known) or 'none'}."
        )
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if construct and missing:
        texts = described(target)
        about = "".join(f". {option}: {texts[option].removesuffix('.')}" for option in missing if option in texts)
        raise ValueError(
            f"reward {name!r} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"write `options: {{{': …, '.join(missing)}: …}}` beside its name{about}"
        )


def _identity(reward: Callable[..., Any]) -> str:
    named = reward if hasattr(reward, "__qualname__") else type(reward)
    return f"{named.__module__}:{named.__qualname__}"
