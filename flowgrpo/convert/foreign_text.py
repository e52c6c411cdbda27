"""Reading a file of another tool within bounds, and telling which tool it belongs to. No such file is ever executed."""

from __future__ import annotations

import io
import stat
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..configs.yaml_text import LONGEST, as_mapping, parse_yaml
from ..intake.json_text import parse_json

Tool = Literal["flow-factory", "flow_grpo", "trl", "unirl", "verl-omni"]
TOOLS: tuple[Tool, ...] = ("flow-factory", "flow_grpo", "trl", "unirl", "verl-omni")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
MOST_TOKENS = 2_000
"""Largest number of tokens of one statement. A deeper expression could overflow the stack of Python's parser."""

OF_FLOW_FACTORY = {"train", "model", "scheduler", "eval", "log", "data", "rewards", "eval_rewards"}
OF_TRL = {
    "num_generations", "max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps",
    "reward_funcs", "model_name_or_path", "loss_type", "scale_rewards", "learning_rate", "output_dir",
    "teacher_model_name_or_path",
}  # fmt: skip
OF_FLOWGRPO = {"sampler", "rollout", "optimizer", "objective", "generation"}


def read_source(path: Path) -> str:
    """The text of a file of another tool.

    Raises:
        ValueError: the path is not a file, or the file is too long, not text, or a pickle.
    """
    if path.suffix in (".bin", ".pt", ".pkl", ".pickle"):
        raise ValueError(
            f"{path} is a pickle, and reading a pickle runs the code in it; write the settings as JSON, for TRL with "
            "`print(training_args.to_json_string())`, and convert that file"
        )
    if not path.exists():
        raise ValueError(f"there is no file {str(path)!r}; give the configuration file of another tool")
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a file; give the configuration file of another tool")
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if len(text) > LONGEST:
        raise ValueError(
            f"{path} has more than {LONGEST:,} characters, and a configuration has at most {LONGEST:,}; look where "
            "the file comes from"
        )
    return text


def read_mapping(path: Path, text: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON text; its keys are texts.

    Raises:
        ValueError: the text is neither, or holds something else.
    """
    holds = "the settings of another tool, as KEY: VALUE"
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        try:
            return _named(as_mapping(parse_json(text), str(path), holds), path)
        except ValueError as error:
            # Every JSON object is also YAML, with comments and quotes that JSON does not allow.
            if path.suffix == ".json":
                raise ValueError(f"{path} is not JSON: {error}") from None
    return _named(as_mapping(parse_yaml(text, str(path)), str(path), holds), path)


def _named(found: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    wrong = next((key for key in found if not isinstance(key, str)), None)
    if wrong is not None:
        raise ValueError(f"{path}: the key {wrong!r:.40} is not text; quote it if it is a name")
    return dict(found)


def tool_of(path: Path, text: str) -> Tool:
    """The tool that a file belongs to, by what it holds.

    Raises:
        ValueError: it belongs to none of `TOOLS`, or is a recipe of this package.
    """
    if path.suffix == ".py":
        return "flow_grpo"
    if path.suffix in SCRIPTS:
        if "verl_omni" in text or "actor_rollout_ref." in text:
            return "verl-omni"
        raise ValueError(
            f"{path} is a shell script, and convert reads only the scripts of verl-omni; write the options of its "
            "`trl` command into a YAML file, as learning_rate: 1.0e-5 for --learning_rate 1e-5. For a script of "
            "DanceGRPO, begin with the recipe dance_grpo@published"
        )
    found = read_mapping(path, text)
    if any(isinstance(found[key], dict) and _of_unirl(found[key]) for key in found):
        return "unirl"
    keys = {key for key in found if key in OF_FLOW_FACTORY and isinstance(found[key], dict | list)}
    if isinstance(found.get("train"), dict) and (
        {"model", "scheduler", "data"} & keys or "trainer_type" in found["train"]
    ):
        return "flow-factory"
    if len(OF_FLOWGRPO & set(found)) >= 2 or ("rewards" in found and OF_FLOWGRPO & set(found)) or "base" in found:
        raise ValueError(f"{path} is a recipe of flowgrpo already; train it with `flowgrpo train {path}`")
    if len(OF_TRL & set(found)) >= 2:
        return "trl"
    raise ValueError(
        f"{path} looks like a configuration of none of {', '.join(TOOLS)}; if it is one, say which with --from"
    )


def _of_unirl(section: Mapping[str, Any]) -> bool:
    """Whether a section, or a section in it, names a class of UniRL."""
    inner = [held for held in section.values() if isinstance(held, dict)]
    return any(str(held.get("_target_", "")).startswith("unirl.") for held in (section, *inner))


def check_statements(path: Path, text: str) -> None:
    """Refuse Python whose statements are too long to be parsed safely.

    Raises:
        ValueError: a statement is too long, or the text is not Python.
    """
    count = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.NL):
                continue
            count = 0 if token.type == tokenize.NEWLINE else count + 1
            if count > MOST_TOKENS:
                raise ValueError(
                    f"{path}, line {token.start[0]}: a statement has more than {MOST_TOKENS:,} words and signs, which "
                    "no configuration has; look where the file comes from"
                )
    except (tokenize.TokenError, SyntaxError) as error:
        raise ValueError(f"{path} is not Python: {error.args[0] if error.args else error}") from None
