"""Rewards with one fault each, and the same rewards without the fault."""

import itertools

import torch
from torch import Tensor


def _mean(images: Tensor) -> Tensor:
    return images.flatten(1).mean(1)


def brightness(images, prompts):
    """No fault."""
    return _mean(images)


def noisy(images, prompts):
    return _mean(images) + 0.1 * torch.rand(len(images))


class OwnNoise:
    def __init__(self):
        self.generator = torch.Generator()
        self.generator.seed()

    def __call__(self, images, prompts):
        return _mean(images) + 0.1 * torch.rand(len(images), generator=self.generator)


class Drifting:
    def __init__(self):
        self.calls = itertools.count()

    def __call__(self, images, prompts):
        return _mean(images) + 0.01 * next(self.calls)


def normalised(images, prompts):
    scores = _mean(images)
    return (scores - scores.mean()) / (scores.std(correction=0) + 1e-6)


def numbered(images, prompts):
    return _mean(images) + 0.1 * torch.arange(len(images))


def contrast(images, prompts):
    """0/0 for a picture of one value."""
    spread = images.flatten(1).std(1)
    return spread * (spread / spread)


def doubling(images, prompts):
    return _mean(images.mul_(0.5))


class Holding:
    """Turns gradients on, for a model that it has not frozen."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    @torch.enable_grad()
    def __call__(self, images, prompts):
        return _mean(images) * self.weight


class Keeping(Holding):
    """Returns plain numbers, but keeps the graphs."""

    def __init__(self):
        super().__init__()
        self.last = None

    def __call__(self, images, prompts):
        self.last = super().__call__(images, prompts)
        return self.last.tolist()


class Hoarding:
    def __init__(self):
        self.seen = []

    def __call__(self, images, prompts):
        self.seen.append(images.clone())
        return _mean(images)


def corner(images, prompts):
    """Looks at the first 32 pixels of each side, whatever the size."""
    return _mean(images[..., :32, :32])


def squeezed(images, prompts):
    return images.mean((1, 2, 3), keepdim=True).squeeze()


def columnar(images, prompts):
    return _mean(images)[:, None]


def halved(images, prompts):
    return _mean(images).bfloat16()


def offset(images, prompts):
    return _mean(images) + 1e5


def ends(images, prompts):
    return [len(prompt) / len(prompt.split()) + x for prompt, x in zip(prompts, _mean(images).tolist())]


def short_prompts(images, prompts):
    if any(len(prompt) > 1000 for prompt in prompts):
        raise RuntimeError("a prompt is longer than the text encoder takes")
    return _mean(images)


def of_64(images, prompts):
    return _mean(images.view(-1, 3, 64, 64))


def spoiling(images, prompts, include):
    for entries in include:
        entries.append({})
    return _mean(images)


class Unlike:
    """No fault: it is meant to compare the group."""

    whole_group = True

    def __call__(self, images, prompts):
        flat = images.flatten(1)
        return torch.cdist(flat, flat).sum(1) / max(len(flat) - 1, 1)


def spaced(completions, prompts):
    """Whether the completion begins with its answer."""
    return [float(text[:1].isdigit()) for text in completions]


def per_word(completions, prompts):
    return [len(text) / len(text.split()) for text in completions]


class Rounded:
    """Compares a group, and lets the place of an image decide where scores are equal."""

    whole_group = True

    def __call__(self, images, prompts):
        scores = _mean(images).round(decimals=1) + 1e-6 * torch.arange(len(images))
        return scores.argsort().argsort().float()
