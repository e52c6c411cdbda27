"""Calling an unmodified diffusers pipeline with a scheduler that hands every step to us.

Nothing here changes a pipeline for longer than one call: attributes are put on the instance and taken off
again.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .recorder import Recorder, Stop

_OURS = {"prompt", "latents", "num_inference_steps", "generator", "output_type", "return_dict", "timesteps"}
_OURS |= {"callback_on_step_end", "callback_on_step_end_tensor_inputs"}
_TEXT = re.compile(r"(negative_)?prompt(_\d+)?")
_CONDITIONING_SEED = 0


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set instance attributes for the duration of the block.

    Goes through `__dict__`: a pipeline's own `__setattr__` rewrites its config, a module's registers
    children.
    """
    saved = {name: owner.__dict__[name] for name in attributes if name in owner.__dict__}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            owner.__dict__.pop(name, None)
        owner.__dict__.update(saved)


@contextmanager
def injecting(pipe: Any, x: Tensor) -> Iterator[None]:
    """Within the block, `pipe.prepare_latents` draws as ever, then returns x in place of what it drew."""
    if not hasattr(pipe, "prepare_latents"):
        raise RuntimeError(f"{type(pipe).__name__} has no prepare_latents to inject a state into")
    original = pipe.prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        parts = list(made) if isinstance(made, tuple) else [made]
        for j, part in enumerate(parts):
            if isinstance(part, Tensor) and part.is_floating_point() and part.shape == x.shape:
                parts[j] = x.to(device=part.device, dtype=part.dtype)
                return tuple(parts) if isinstance(made, tuple) else parts[j]
        raise RuntimeError(f"prepare_latents returned no tensor of the state's shape {tuple(x.shape)}")

    with replaced(pipe, prepare_latents=prepare_latents):
        yield


@contextmanager
def intercepting(
    pipe: Any, answer: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Within the block, each denoiser forward is `answer(forward, args, kwargs)`."""
    names = [name for name in pipe.components if "transformer" in name or "unet" in name]
    modules = [module for name in names if isinstance(module := getattr(pipe, name), nn.Module)]
    if not modules:
        raise RuntimeError(f"{type(pipe).__name__} has no component named 'transformer' or 'unet'")
    originals = {id(module): (module, module.forward) for module in modules}

    def substitute(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: answer(forward, args, kwargs)

    with ExitStack() as stack:
        for module, forward in originals.values():
            stack.enter_context(replaced(module, forward=substitute(forward)))
        yield


def stopping_at_denoiser(pipe: Any) -> Any:
    """Context manager: a call ends where it would first evaluate its denoiser."""

    def answer(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise Stop

    return intercepting(pipe, answer)


def skipping_denoiser(pipe: Any, skip: Callable[[], bool]) -> Any:
    """Context manager: while `skip()` holds, the denoiser answers zeros.

    The form of an answer is learnt from one real forward, without gradient, for each denoiser and batch size.
    """
    templates: dict[Any, Any] = {}

    def zeros(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf

    def answer(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not skip():
            return forward(*args, **kwargs)
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if (forward, shapes) not in templates:
            with torch.no_grad():
                templates[forward, shapes] = forward(*args, **kwargs)
        return tree_map(zeros, templates[forward, shapes])

    return intercepting(pipe, answer)


class PipelineCall:
    """A pipeline with the keyword arguments it is called with.

    Args:
        pipe: any diffusers pipeline.
        call: keyword arguments of `pipe.__call__` (height, width, guidance_scale, negative_prompt, ...).
            Texts given as one string are repeated for every row.

    Raises:
        ValueError: if `call` names an argument the pipeline does not have, or one set by us.
    """

    def __init__(self, pipe: Any, call: Mapping[str, Any]) -> None:
        self.pipe = pipe
        self.call = dict(call)
        # Diffusers decorates __call__ with no_grad; below it the caller's own grad mode decides.
        self._function = getattr(type(pipe).__call__, "__wrapped__", type(pipe).__call__)
        self.parameters = inspect.signature(self._function).parameters
        for name in self.call:
            if name in _OURS or name.endswith("_per_prompt"):
                raise ValueError(f"call[{name!r}] is set for each evaluation; remove it")
            if name == "sigmas":
                raise ValueError(
                    "call['sigmas'] is a table before the shift; give Denoiser(sigmas=...) the table after it"
                )
            if not self.accepts(name):
                close = difflib.get_close_matches(name, list(self.parameters), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"{type(pipe).__name__}.__call__ has no argument {name!r} (in call){hint}")

    def accepts(self, name: str) -> bool:
        """Whether `__call__` has an argument of this name (or takes any)."""
        return name in self.parameters or any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def run(self, recorder: Recorder, prompts: Sequence[str], steps: int, **extra: Any) -> Any:
        """Call the pipeline with `recorder` as its scheduler.

        Args:
            recorder: armed for this call.
            prompts: N texts, one a row.
            steps: num_inference_steps.
            extra: further keyword arguments (latents, output_type, ...).

        Returns:
            The first element of what the pipeline returns, or None if a hook ended the call by `Stop`.
        """
        rows = len(prompts)
        kwargs = {
            name: [value] * rows if isinstance(value, str) and _TEXT.fullmatch(name) else value
            for name, value in self.call.items()
        }
        # Conditioning that is sampled (a VAE posterior) must come out the same in every call of one sample.
        generators = [torch.Generator().manual_seed(_CONDITIONING_SEED) for _ in range(rows)]
        kwargs |= {"generator": generators, "num_inference_steps": steps, "return_dict": False, **extra}
        attributes: dict[str, Any] = {"scheduler": recorder, "_progress_bar_config": {"disable": True}}
        if hasattr(self.pipe, "encode_prompt"):
            # Attention may take another kernel when its inputs want a gradient; the embeddings, and so the
            # prediction, would then differ between rollout and training by rounding.
            attributes["encode_prompt"] = _without_grad(self.pipe.encode_prompt)
        with replaced(self.pipe, **attributes):
            try:
                return self._function(self.pipe, prompt=list(prompts), **kwargs)[0]
            except Stop:
                return None


def _without_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapper
