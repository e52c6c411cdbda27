"""Steps and decoding of a pipeline as functions that can be differentiated, as rewards with gradients need them."""

from pathlib import Path

import pytest
import torch

from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.conformance.subject import TEXTS
from flowgrpo.pipelines.denoiser import Denoiser

# Cosmos decodes for a filter in numpy, and Kandinsky 5 writes the first frame into its latents.
WITHOUT = {"Cosmos2TextToImagePipeline", "Cosmos2VideoToWorldPipeline", "Kandinsky5I2VPipeline"}
# Its own call fails.
NEVER_CALLED = {"ChromaInpaintPipeline"}
FEW = ("StableDiffusion3Pipeline", "Flux2KleinPipeline", "QwenImagePipeline", "WanPipeline", "LTX2Pipeline")


# No step fits all classes: a step is too long if a prediction bends strongly, and too short if a class rounds inside.
STEPS = 1e-2, 5e-4


def require_slopes(denoiser: Denoiser, x: torch.Tensor, texts: list[str]) -> None:
    """Compare the gradient of each step's prediction with respect to the state with a small change of the state."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    for i in range(denoiser.num_steps):
        state = x.detach().float().requires_grad_()
        (slope,) = torch.autograd.grad((denoiser.velocity(state, i, texts).float() * weight).sum(), state)
        ratios = []
        for step in STEPS:
            move = step * float(x.norm()) * slope / slope.norm()
            with torch.no_grad():
                up, down = (denoiser.velocity(x + sign * move, i, texts).double() for sign in (1, -1))
            ratios.append(float(((up - down) * weight).sum() / (2.0 * (slope * move).sum())))
        assert min(abs(ratio - 1.0) for ratio in ratios) < 0.1, (i, ratios)


def require_gradient(name: str, folder: Path) -> None:
    """Differentiate the predictions and the images, which must be those of decoding without a graph."""
    tiny = TINY[name]
    tiny.fresh().save_pretrained(folder)
    pipe, texts = tiny.loaded(folder), list(tiny.texts or TEXTS)[: tiny.batch]
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    denoiser = Denoiser(pipe, num_steps=tiny.steps, call=dict(tiny.call), example=texts[0])
    denoiser.self_check(texts)
    noise = torch.randn(len(texts), *denoiser.probe.latent_shape, generator=torch.Generator().manual_seed(3))
    x = noise.to(denoiser.probe.dtype).requires_grad_()
    require_slopes(denoiser, x.detach(), texts)
    images = denoiser.decode_with_graph(x, texts)
    assert torch.equal(images.detach(), denoiser.decode(x.detach(), texts))
    (slope,) = torch.autograd.grad(images.sum(), x)
    assert bool(slope.isfinite().all())
    assert bool((slope.flatten(1).abs().sum(1) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_the_steps_and_images_of_a_class_have_a_gradient(name: str, tmp_path: Path) -> None:
    require_gradient(name, tmp_path)


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TINY) - NEVER_CALLED))
def test_the_steps_and_images_of_every_class_have_a_gradient(name: str, tmp_path: Path) -> None:
    if name not in WITHOUT:
        require_gradient(name, tmp_path)
        return
    with pytest.raises(RuntimeError, match=r"requires grad|modified by an inplace operation"):
        require_gradient(name, tmp_path)
