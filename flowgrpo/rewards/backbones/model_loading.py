"""Weights of reward models: where the weights are, and checks that all of them were loaded.

If a checkpoint lacks some weights, libraries fill them with random numbers and give a warning. A reward with random
weights looks like any other reward, so here missing weights are an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HUB = "hf-hub:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_dtype(reward: str, dtype: str) -> torch.dtype:
    """Return the dtype with a given name.

    Raises:
        ValueError: the name is none of float32, bfloat16 and float16.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{reward}: dtype is {dtype!r}; give one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def find_file(reward: str, option: str, name: str) -> Path:
    """Return the path of a file of weights or settings.

    Args:
        reward: name of the reward, for messages.
        option: the option in which the user named the file, for messages.
        name: a path, or "hf-hub:ORG/NAME/FILE", which is downloaded once.

    Raises:
        ValueError: there is no such file, or it cannot be downloaded.
    """
    if not name.startswith(HUB):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"{reward}: {option}={name!r} is not a file; give a path or '{HUB}ORG/NAME/FILE'")
        return path.resolve()
    from huggingface_hub import hf_hub_download

    repository, _, file = name.removeprefix(HUB).partition("/")[2].partition("/")
    owner = name.removeprefix(HUB).partition("/")[0]
    if not (owner and repository and file):
        raise ValueError(f"{reward}: {option}={name!r} is incomplete; write '{HUB}ORG/NAME/FILE'")
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file))
    except Exception as error:
        raise ValueError(
            f"{reward}: {file} of {owner}/{repository} cannot be downloaded ({type(error).__name__}: {error}); "
            f"set {option} to the path of a copy"
        ) from error


def read_state(reward: str, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.safetensors` file or a PyTorch checkpoint, from its entry `state_dict` if there is one.

    Raises:
        ValueError: the file cannot be read, or contains objects other than tensors and plain values.
    """
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Without `weights_only`, torch would run any code that a downloaded pickle names.
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{reward}: {path} cannot be read as weights ({error}). A pickle with other objects than tensors "
            "is not opened; convert the file to safetensors"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{reward}: {path} does not contain weights by name")
    return dict(state)


def fit(reward: str, module: nn.Module, state: Mapping[str, Tensor], source: Path) -> None:
    """Load weights into a module. Names and shapes must be exactly the same as in the module.

    Raises:
        ValueError: a weight is missing, unknown to the module, or of another shape.
    """
    own = module.state_dict()
    problems = [f"it lacks {key}" for key in own if key not in state]
    problems += [f"it has {key}, which the model does not have" for key in state if key not in own]
    problems += [
        f"{key} has shape {list(state[key].shape)}, but the model has {list(value.shape)}"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ]
    if problems:
        more = f", and {len(problems) - 1} more" * (len(problems) > 1)
        raise ValueError(f"{reward}: {source} does not fit the model: {problems[0]}{more}")
    module.load_state_dict(state)


def linear_stack(
    state: Mapping[str, Tensor], prefix: str = "", between: Callable[[], nn.Module] | None = None
) -> nn.Sequential | None:
    """Return the linear layers under `prefix`, in the order of their numbers, in float32.

    Dropout between the layers is left out, because it has no effect at inference.

    Args:
        state: weights by name: `{prefix}N.weight` [out, in] and, if a layer has a bias, `{prefix}N.bias` [out].
        prefix: the part of the name before the number.
        between: function that makes the module between two layers. By default there is none, as in the published heads
            of ImageReward and the aesthetic predictor.

    Returns:
        The layers, or None if there are none or if the sizes of neighbouring layers do not fit.
    """
    names = [key.removeprefix(prefix).removesuffix(".weight") for key in state if key.startswith(prefix)]
    layers: list[nn.Linear] = []
    for number in sorted({int(name) for name in names if name.isdecimal()}):
        weight, bias = state[f"{prefix}{number}.weight"], state.get(f"{prefix}{number}.bias")
        if weight.ndim != 2 or (layers and layers[-1].out_features != weight.shape[1]):
            return None
        layers.append(linear(weight, bias))
    if not layers:
        return None
    parts: list[nn.Module] = [layers[0]]
    for layer in layers[1:]:
        parts += [layer] if between is None else [between(), layer]
    return nn.Sequential(*parts).eval().requires_grad_(False)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with this weight [out, in] and bias [out], in float32."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    values = {"weight": weight.float(), **({} if bias is None else {"bias": bias.float()})}
    layer.load_state_dict(values, assign=True)
    return layer.eval().requires_grad_(False)


def source_name(reward: str, option: str, name: str) -> str:
    """Return a folder as an absolute path, or a model id of the hub unchanged.

    Raises:
        ValueError: the name is written as a path, and there is no such folder.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if path.is_absolute() or name.startswith((".", "~")) or path.is_file() or name.count("/") > 1:
        raise ValueError(
            f"{reward}: {option}={name!r} is not a folder; give a folder, or a model id such as 'org/name'"
        )
    return name


def load_transformers(
    reward: str,
    kind: Any,
    source: str,
    *,
    dtype: torch.dtype,
    device: str,
    weights: tuple[Any, Mapping[str, Tensor]] | None = None,
) -> Any:
    """Load a transformers model, frozen and in evaluation mode.

    Args:
        reward: name of the reward, for messages.
        kind: the class of the model, such as `CLIPModel`.
        source: folder or model id. If `weights` are given, it only names them in messages.
        dtype: data type of the weights.
        device: device of the model.
        weights: configuration and state to use instead of the ones in `source`.

    Raises:
        ValueError: the model cannot be loaded, or weights are missing or of another shape.
    """
    given = {} if weights is None else {"config": weights[0], "state_dict": dict(weights[1])}
    try:
        with fixed_generator():
            model, report = kind.from_pretrained(
                None if weights else source, dtype=dtype, output_loading_info=True, **given, **_no_code(kind)
            )
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{reward}: {source} cannot be loaded as {kind.__name__}: {error}") from error
    lost = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if lost:
        raise ValueError(
            f"{reward}: {source} has no weights that fit {lost[0]}{f' and {len(lost) - 1} more' * (len(lost) > 1)} "
            f"of {kind.__name__}; is it another kind of model?"
        )
    return model.to(device).eval().requires_grad_(False)


def _no_code(kind: Any) -> dict[str, bool]:
    """For a class that chooses another: without this, transformers would ask at the terminal whether to run code."""
    return {"trust_remote_code": False} if kind.__name__.startswith("Auto") else {}


def load_processor(reward: str, kind: Any, source: str) -> Any:
    """Load a processor, image processor, tokenizer or configuration of transformers.

    Raises:
        ValueError: the files are missing or unusable.
    """
    try:
        return kind.from_pretrained(source, **_no_code(kind))
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{reward}: {source} holds no {kind.__name__.removeprefix('Auto').lower()}: {error}"
        ) from error


@contextlib.contextmanager
def fixed_generator() -> Iterator[None]:
    """In this context modules get the same random weights in every process; the caller's generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
