"""Call an unmodified diffusers pipeline with a scheduler that passes every step to a hook of ours.

No function here changes a pipeline for longer than one call: attributes are set on the instance, and removed
afterwards.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..weights.borrowing import replaced
from ..weights.pipeline_classes import Together, adapter_of
from .arguments import accepts, did_you_mean, set_by_us
from .encodings import encodings_of, fingerprint
from .pipeline_error import PipelineError
from .placement import Placement
from .recorder import LoopStopped, Recorder

_TEXT = re.compile(r"(negative_)?prompt(_\d+)?")
_CONDITIONING_SEED = 0
GUIDERS = "guider", "ocr_guider"
"""Components of pipelines that hold their guidance."""


@contextmanager
def injecting(pipe: Any, x: Tensor, everywhere: bool = False) -> Iterator[None]:
    """Within the block, `pipe.prepare_latents` draws as usual, then returns x in place of its own state.

    With `everywhere`, it returns x also in place of the other tensors of this shape. An inpainting pipeline then pastes
    x into itself, so it decodes x unchanged.
    """
    if not hasattr(pipe, "prepare_latents"):
        raise PipelineError(f"{type(pipe).__name__} has no prepare_latents to inject a state into")
    original = pipe.prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        parts = list(made) if isinstance(made, tuple) else [made]
        places = [
            j
            for j, part in enumerate(parts)
            if isinstance(part, Tensor) and part.is_floating_point() and part.shape == x.shape
        ]
        if not places:
            raise PipelineError(f"prepare_latents returned no tensor of the state's shape {tuple(x.shape)}")
        parts[places[0]] = x.to(device=parts[places[0]].device, dtype=parts[places[0]].dtype)
        for j in places[1:] if everywhere else []:
            # The strides stay, because the rounding of the decoder depends on them.
            parts[j] = torch.empty_like(parts[j]).copy_(x)
        return tuple(parts) if isinstance(made, tuple) else parts[0]

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
        raise PipelineError(f"{type(pipe).__name__} has no component named 'transformer' or 'unet'")
    # A call of a module looks up these attributes first. The module's hooks run inside them, and the hooks of a sharded
    # module gather its weights.
    originals = {id(module): (module, module._compiled_call_impl or module._call_impl) for module in modules}

    def substitute(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: answer(forward, args, kwargs)

    with ExitStack() as stack:
        for module, forward in originals.values():
            stack.enter_context(replaced(module, _compiled_call_impl=substitute(forward)))
        yield


def stopping_at_denoiser(pipe: Any) -> Any:
    """Context manager: a call ends just before its first evaluation of the denoiser."""

    def answer(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise LoopStopped

    return intercepting(pipe, answer)


def skipping_denoiser(pipe: Any, skip: Callable[[], bool], forms: dict[Any, Any], value: float = 0.0) -> Any:
    """Context manager: while `skip()` is true, each number that the denoiser returns is `value`.

    For each denoiser and each shape of its inputs, one real forward without gradient shows the structure of the output.
    The structure, without values, is kept in `forms`.
    """

    def form(leaf: Any) -> Any:
        return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf

    def answer(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not skip():
            return forward(*args, **kwargs)
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        owner = getattr(forward, "__self__", None)
        key = (id(owner if owner is not None else forward), shapes)
        if key not in forms:
            with torch.no_grad():
                leaves, layout = tree_flatten(forward(*args, **kwargs))
            forms[key] = ([form(leaf) for leaf in leaves], [isinstance(leaf, Tensor) for leaf in leaves], layout)
        known, tensors, layout = forms[key]
        made = [
            torch.full(item[0], value, dtype=item[1], device=item[2]) if is_tensor else item
            for item, is_tensor in zip(known, tensors)
        ]
        return tree_unflatten(made, layout)

    return intercepting(pipe, answer)


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (str, bool, int, float))


class ConditionedPrompt(str):
    """A prompt with its own keyword arguments for the pipeline, such as the picture to edit or the first frame.

    The prompt is a string, and can be used like any other text. Two prompts with equal texts may have different
    arguments.

    Attributes:
        call: the arguments; they take precedence over the arguments of the `Denoiser`.
    """

    call: Mapping[str, Any]
    _mark: Any = None

    def __new__(cls, text: str, **call: Any) -> ConditionedPrompt:
        """Args: the text, and the arguments by name; the arguments must not be changed later."""
        made = super().__new__(cls, text)
        made.call = call
        return made

    @property
    def mark(self) -> Any:
        """A mark that distinguishes these arguments from all others; None if a value has no fingerprint."""
        if self._mark is None:
            self._mark = fingerprint(self.call)
        return self._mark


def kin(prompts: Sequence[str], together: Together) -> list[list[int]]:
    """Groups of rows, each for one call: the pipeline takes the rows together, and their own arguments are equal."""
    if together == "all" and not any(isinstance(prompt, ConditionedPrompt) and prompt.call for prompt in prompts):
        return [list(range(len(prompts)))]
    groups: dict[Any, list[int]] = {}
    for row, prompt in enumerate(prompts):
        mark = (prompt.mark or id(prompt.call)) if isinstance(prompt, ConditionedPrompt) and prompt.call else None
        among = {"all": None, "prompt": str(prompt), "one": row}[together]
        groups.setdefault((among, mark), []).append(row)
    return list(groups.values())


def company(prompts: Sequence[str], together: Together) -> list[str]:
    """As many of the prompts as one call can hold. If a call holds only rows of one prompt, this prompt is doubled."""
    first = [prompts[row] for row in kin(prompts, together)[0]]
    return first * 2 if together == "prompt" and len(first) == 1 < len(prompts) else first


class PipelineCall:
    """A pipeline, with the keyword arguments of its calls.

    Args:
        pipe: any diffusers pipeline.
        call: keyword arguments of `pipe.__call__` (height, width, guidance_scale, negative_prompt, ...).
            Texts given as one string are repeated for every row.

    Raises:
        ValueError: if `call` names an argument that the pipeline does not have, or that flowgrpo itself sets.
    """

    def __init__(self, pipe: Any, call: Mapping[str, Any]) -> None:
        self.pipe = pipe
        self.adapter = adapter_of(pipe)
        self.call = {**self.adapter.call, **call}
        if self.adapter.prepare is not None:
            self.adapter.prepare(pipe)
        self._encodings = encodings_of(pipe)
        self._placement = Placement(pipe)
        # Diffusers decorates __call__ with no_grad; the function below the decorator keeps the caller's grad mode.
        self._function = getattr(type(pipe).__call__, "__wrapped__", type(pipe).__call__)
        self.parameters = inspect.signature(self._function).parameters
        for name in self.call:
            self._require(name)

    def keep_encodings(self, prompts: int) -> None:
        """Remember the pictures of at least this many prompts at a time."""
        self._encodings.hold(prompts)

    def recalled(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` has made for this key; it is remembered with the encoded pictures."""
        return self._encodings.recalled(key, make)

    def accepts(self, name: str) -> bool:
        """Whether `__call__` has an argument of this name, or accepts any argument."""
        return accepts(self.parameters, name)

    def _require(self, name: str) -> None:
        if set_by_us(name):
            raise ValueError(f"call[{name!r}] is set for each evaluation; remove it")
        if name == "sigmas":
            raise ValueError("call['sigmas'] is a table before the shift; give Denoiser(sigmas=...) the table after it")
        if not self.accepts(name):
            hint = did_you_mean(self.parameters, name)
            raise ValueError(f"{type(self.pipe).__name__}.__call__ has no argument {name!r} (in call){hint}")

    def called_with(self, changes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Within the block, these arguments have other values.

        Raises:
            ValueError: as for the arguments of the constructor.
        """
        for name in changes:
            self._require(name)
        return replaced(self, call=self.call | dict(changes))

    @property
    def conditioned(self) -> bool:
        """Whether the arguments hold more than texts and numbers, such as a picture."""
        return not all(_plain(value) for value in self.call.values())

    def run(
        self, recorder: Recorder, prompts: Sequence[str], steps: int, seed: int = _CONDITIONING_SEED, **extra: Any
    ) -> Any:
        """Call the pipeline with `recorder` as its scheduler.

        Args:
            recorder: armed for this call.
            prompts: N texts, one for each row; if they are `ConditionedPrompt`s, their arguments must be equal.
            steps: num_inference_steps.
            seed: of the generators. Sampled conditioning, such as the posterior of a VAE, must be equal in every call
                for one sample, so only a call that is not compared with others may have another seed.
            extra: further keyword arguments (latents, output_type, ...).

        Returns:
            The first element of what the pipeline returns, or None if a hook ended the call by `LoopStopped`.
        """
        rows, given = len(prompts), self.call
        if isinstance(prompts[0], ConditionedPrompt):
            for name in prompts[0].call:
                self._require(name)
            given = given | dict(prompts[0].call)
        kwargs = {name: self._in_rows(name, value, rows) for name, value in given.items()}
        generators = [torch.Generator().manual_seed(seed) for _ in range(rows)]
        kwargs |= {"generator": generators, "num_inference_steps": steps, "return_dict": False, **extra}
        texts: Any = [str(prompt) for prompt in prompts]
        if self.adapter.text:
            texts = texts[0]
            kwargs["generator"] = generators[0]
            kwargs |= {name: value[0] for name, value in kwargs.items() if _TEXT.fullmatch(name) and value}
        attributes: dict[str, Any] = {"scheduler": recorder, "_progress_bar_config": {"disable": True}}
        if hasattr(self.pipe, "encode_prompt"):
            attributes["encode_prompt"] = self._encodings.encode_prompt(self.pipe.encode_prompt)
        for guider in filter(None, (getattr(self.pipe, name, None) for name in GUIDERS)):
            # A guider remembers the step at which the last call ended. A pipeline asks it before the first step
            # whether a negative prompt is needed, and in an unguided step the answer would be no.
            guider.set_state(step=None, num_inference_steps=None, timestep=None)
        with replaced(self.pipe, **attributes), self._encodings.active(), self._placement.remembered():
            try:
                return self._function(self.pipe, prompt=texts, **kwargs)[0]
            except LoopStopped:
                return None

    def _in_rows(self, name: str, value: Any, rows: int) -> Any:
        once = isinstance(value, str) and bool(_TEXT.fullmatch(name))
        if name in self.adapter.rows and not isinstance(value, (list, tuple)):
            once = True
        return [value] * rows if once else value
