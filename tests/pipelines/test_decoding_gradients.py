"""The decoding of a pipeline as a function that can be differentiated, for rewards whose gradients are followed."""

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


def require_gradient(name: str, folder: Path) -> None:
    """Decode with a graph, and compare the images with those without, and the slope with a small change."""
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
    images = denoiser.decode_with_graph(x, texts)
    assert torch.equal(images.detach(), denoiser.decode(x.detach(), texts))
    (slope,) = torch.autograd.grad(images.sum(), x)
    assert bool(slope.isfinite().all())
    assert bool((slope.flatten(1).abs().sum(1) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_the_images_of_a_class_have_a_gradient(name: str, tmp_path: Path) -> None:
    require_gradient(name, tmp_path)


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TINY) - NEVER_CALLED))
def test_the_images_of_every_other_class_have_a_gradient(name: str, tmp_path: Path) -> None:
    if name not in WITHOUT:
        require_gradient(name, tmp_path)
        return
    with pytest.raises(RuntimeError, match=r"requires grad|modified by an inplace operation"):
        require_gradient(name, tmp_path)
