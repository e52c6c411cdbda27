"""Pictures, masks and videos that condition a pipeline are encoded once, not at every evaluation."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..weights.borrowing import replaced

_LEAST = 64
_A_PROMPT = 4
_SEED = 0
_OF_PIPELINE: weakref.WeakKeyDictionary[Any, Encodings] = weakref.WeakKeyDictionary()


def encodings_of(pipe: Any) -> Encodings:
    """The encodings of a pipeline. Each call returns the same object."""
    if pipe not in _OF_PIPELINE:
        _OF_PIPELINE[pipe] = Encodings(weakref.proxy(pipe))
    return _OF_PIPELINE[pipe]


class Encodings:
    """Remembers the outputs of a pipeline's frozen encoders.

    Within `active`, `vae.encode`, the image encoders and `encode_prompt` (if pictures go into it) look an input up in
    memory before they encode it. If a pipeline samples from a posterior without a generator, the sample is the same
    each time, because conditioning must not change between rollout and training.

    Args:
        pipe: the pipeline. Only this instance is changed, and only within `active`.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        # Listing the components of a pipeline reads the signature of its class, which is too slow for every call.
        self._encoders = [name for name in pipe.components if name.startswith("image_encoder")]
        self._connectors = [name for name in pipe.components if name.startswith("connectors")]
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._most = _LEAST

    def hold(self, prompts: int) -> None:
        """Make room for a rollout of `prompts` prompts, each with its own pictures.

        Every step of a rollout goes through all its prompts. With less room, each prompt would be forgotten before the
        next step.
        """
        self._most = max(_LEAST, _A_PROMPT * prompts)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, equal inputs are encoded once."""
        with ExitStack() as stack:
            vae = getattr(self.pipe, "vae", None)
            if isinstance(vae, nn.Module) and hasattr(vae, "encode"):
                stack.enter_context(replaced(vae, encode=self._remembered("vae", vae.encode)))
            for name in self._encoders:
                part = getattr(self.pipe, name)
                if isinstance(part, nn.Module):
                    stack.enter_context(replaced(part, forward=self._remembered(name, part.forward)))
            for name in self._connectors:
                part = getattr(self.pipe, name)
                # They run between the text encoder and the denoiser. As in `encode_prompt`, a gradient would change
                # their rounding. Their outputs are large, so they are not remembered.
                stack.enter_context(replaced(part, forward=torch.no_grad()(part.forward)))
            yield

    def encode_prompt(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`encode_prompt` without gradient. If its arguments hold pictures, its outputs are remembered.

        Attention may use another kernel when its inputs require a gradient. The embeddings, and so the prediction,
        would then differ by rounding between rollout and training.
        """
        remembered = self._remembered("encode_prompt", function)

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            # A PromptCache that replaces `encode_prompt` has a memory of its own.
            cached = hasattr(function, "prompt_cache")
            if not cached and any(_pictorial(value) for value in (*args, *kwargs.values())):
                return remembered(*args, **kwargs)
            with torch.no_grad():
                return function(*args, **kwargs)

        return encode_prompt

    def recalled(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` has made for this key. The keys that were not asked for longest are forgotten."""
        if key not in self._known:
            self._known[key] = make()
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _remembered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                mark = fingerprint((args, kwargs))
                if mark is None:
                    return function(*args, **kwargs)
                return self.recalled((name, mark), lambda: _steady(function(*args, **kwargs)))

        return answer


def fingerprint(value: Any) -> tuple[Any, ...] | None:
    """A key that equal values share. Text and numbers are part of the key; tensors and pictures enter by a digest.

    None for values that cannot be compared in this way (generators, objects).
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return (type(value).__name__, value)
    if isinstance(value, Tensor):
        # A copy, because a dimension of one element may have any stride, and `view` wants the usual one.
        data = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        digest = hashlib.blake2b(data.numpy().tobytes(), digest_size=16).digest()
        return ("tensor", value.dtype, value.device, tuple(value.shape), digest)
    if isinstance(value, Image.Image):
        return ("picture", value.mode, value.size, hashlib.blake2b(value.tobytes(), digest_size=16).digest())
    if isinstance(value, Mapping):
        return _all((name, fingerprint(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return _all((number, fingerprint(item)) for number, item in enumerate(value))
    return None


def _all(pairs: Iterator[tuple[Any, Any]]) -> tuple[Any, ...] | None:
    found = tuple(pairs)
    return None if any(mark is None for _, mark in found) else found


def _pictorial(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_pictorial(item) for item in value)
    return isinstance(value, (Image.Image, Tensor))


def _steady(output: Any) -> Any:
    """Change a posterior so that sampling without a generator gives the same sample each time, wherever a row is."""
    posterior: Any = getattr(output, "latent_dist", None)
    if hasattr(posterior, "sample"):
        sample = posterior.sample

        def steady(generator: Any = None) -> Any:
            # One generator for all rows would give equal pictures other samples at other places of a batch.
            own = [torch.Generator().manual_seed(_SEED) for _ in range(len(posterior.mean))]
            return sample(generator=own if generator is None else generator)

        posterior.sample = steady
    return output
