"""From given pictures to states: the way to the decoder is found by probes, and what cannot be found is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.latents import LatentMap, encode, encoded, find_map, fitted
from flowgrpo.pipelines.pipeline_error import PipelineError
from flowgrpo.pipelines.recorder import LoopStopped

STATE, SHAPE = (6, 4), (4, 2, 3)
PLACE = torch.randperm(24, generator=torch.Generator().manual_seed(3))
FACTOR = torch.linspace(-2.0, 3.0, 24) + 0.01
SHIFT = torch.linspace(-1.0, 1.0, 24)


class Vae(nn.Module):
    """Decodes to a picture of 8×10 pixels; encodes to what it is told to."""

    def __init__(self, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.config, self.z = SimpleNamespace(**config), torch.zeros(1, *SHAPE)
        self.seen: list[Tensor] = []

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def decode(self, z: Tensor) -> Tensor:
        return torch.zeros(len(z), 3, 8, 10)

    def encode(self, pixels: Tensor) -> Any:
        self.seen.append(pixels)
        return SimpleNamespace(latents=self.z.expand(len(pixels), *self.z.shape[1:]))


class Toy:
    """A pipeline that decodes a state in a given way."""

    def __init__(self, way: Any, vae: Any = None) -> None:
        self.vae, self.way = Vae() if vae is None else vae, way

    def decode(self, x: Tensor) -> Any:
        try:
            return self.vae.decode(self.way(x))
        except LoopStopped:
            return None


def scattered(x: Tensor) -> Tensor:
    return (x.flatten(1)[:, PLACE] * FACTOR.to(x.dtype) + SHIFT.to(x.dtype)).view(-1, *SHAPE)


def map_of(toy: Toy, dtype: torch.dtype = torch.float32) -> LatentMap:
    return find_map(toy, STATE, dtype, toy.decode)


def test_places_factors_and_shifts_are_found() -> None:
    found = map_of(Toy(scattered))
    assert torch.equal(found.place, PLACE)
    torch.testing.assert_close(found.factor, FACTOR)
    torch.testing.assert_close(found.shift, SHIFT)
    assert (found.shape, found.state, found.height, found.width, found.frames) == (SHAPE, STATE, 8, 10, None)
    x = torch.randn(5, *STATE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.back(scattered(x)), x, rtol=1e-5, atol=1e-5)


def test_rounding_to_16_bits_averages_out() -> None:
    """A single probe in bfloat16 would leave an error of up to 2^-9 of the largest number in a factor."""
    found = map_of(Toy(scattered, Vae(torch.bfloat16)), torch.bfloat16)
    assert torch.equal(found.place, PLACE)
    exact = torch.tensor(FACTOR.bfloat16().tolist())
    assert float((found.factor - exact).abs().max()) < 2**-9 * float(exact.abs().max())


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (lambda x: x.flatten(1).cumsum(1).view(-1, *SHAPE), "does more than to move, scale and shift"),
        (lambda x: x.flatten(1).square().view(-1, *SHAPE), "does more than to move, scale and shift"),
        (lambda x: torch.zeros(len(x), *SHAPE), "does more than to move, scale and shift"),
        (lambda x: torch.cat([x, x], 1), "states of 24 numbers, and its VAE decodes 48"),
        (lambda x: scattered(x) + 0.1 * scattered(x).square(), "does more than to move, scale and shift"),
    ],
)
def test_another_way_to_the_decoder_is_refused(way: Any, why: str) -> None:
    with pytest.raises(PipelineError, match=f"Toy (has )?{why}"):
        map_of(Toy(way))


def test_a_pipeline_without_a_vae_is_refused() -> None:
    with pytest.raises(PipelineError, match="has no VAE that encodes pictures"):
        find_map(SimpleNamespace(), STATE, torch.float32, lambda x: x)
    toy = Toy(scattered)
    with pytest.raises(PipelineError, match="makes images without its VAE's `decode`"):
        find_map(toy, STATE, torch.float32, lambda x: torch.zeros(1, 3, 8, 8))


def test_a_vae_of_another_shape_is_refused() -> None:
    toy = Toy(scattered)
    found = map_of(toy)
    toy.vae.z = torch.zeros(1, 4, 1, 1)
    with pytest.raises(PipelineError, match=r"encodes a sample to \(4, 1, 1\), and its decoder takes \(4, 2, 3\)"):
        encode(toy, found, torch.zeros(2, 3, 8, 10))


def test_pixels_are_as_the_vae_takes_them() -> None:
    plain = Toy(scattered)
    encoded(plain, torch.full((1, 3, 8, 8), 0.75), 2)
    assert plain.vae.seen[0].unique().tolist() == [0.5]
    bare = Toy(scattered)
    bare.image_processor = SimpleNamespace(config=SimpleNamespace(do_normalize=False))  # type: ignore[attr-defined]
    encoded(bare, torch.full((1, 3, 8, 8), 0.75), 2)
    assert bare.vae.seen[0].unique().tolist() == [0.75]
    clear = Toy(scattered, Vae(in_channels=4))
    encoded(clear, torch.zeros(1, 3, 8, 8), 3)
    assert clear.vae.seen[0].shape == (1, 4, 1, 8, 8)
    assert clear.vae.seen[0][:, 3].unique().tolist() == [1.0]
    video = Toy(scattered)
    encoded(video, torch.zeros(2, 5, 3, 8, 8), 3)
    assert video.vae.seen[0].shape == (2, 3, 5, 8, 8)


def test_a_vae_that_overflows_in_float16_encodes_in_float32() -> None:
    toy = Toy(scattered, Vae(torch.float16, force_upcast=True))
    encoded(toy, torch.zeros(1, 3, 8, 8), 2)
    assert toy.vae.seen[0].dtype == torch.float32
    assert toy.vae.dtype == torch.float16


def test_a_pipeline_that_casts_its_vae_before_it_decodes_gets_it_back() -> None:
    """Stable Diffusion XL in float16 decodes in float32, and casts the VAE back only when it has decoded."""
    toy = Toy(scattered, Vae(torch.float16, force_upcast=True))
    casts: list[torch.dtype] = []

    def way(x: Tensor) -> Tensor:
        casts.append(toy.vae.dtype)
        toy.vae.to(torch.float32)
        return scattered(x.float())

    toy.way = way
    find_map(toy, STATE, torch.float16, toy.decode)
    # The last call is a whole decoding, after which the pipeline itself casts back.
    assert set(casts) == {torch.float16}


def test_pictures_cover_the_size_and_are_cut_around_their_middle() -> None:
    found = LatentMap(SHAPE, STATE, PLACE, FACTOR, SHIFT, 4, 4, None)
    wide = Image.new("RGB", (24, 8))
    wide.paste((255, 0, 0), (6, 0, 18, 8))  # the filter looks a little beyond the cut
    shown = fitted([wide], found)
    assert shown.shape == (3, 4, 4)
    assert shown[0].min() > 0.99
    assert shown[1:].max() < 0.01
    film = LatentMap(SHAPE, STATE, PLACE, FACTOR, SHIFT, 4, 4, 2)
    assert fitted([wide, wide], film).shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"makes videos of 2 frames .* the data give a picture"):
        fitted([wide], film)
    with pytest.raises(ValueError, match="makes pictures, and the data give a video of 2 frames"):
        fitted([wide, wide], found)


@pytest.mark.slow
def test_a_picture_of_the_embedded_pipeline_comes_back() -> None:
    from flowgrpo.training.model_paths import load_pipeline, model_folder

    pipe = load_pipeline(model_folder("scenes"), torch.float32)
    d = Denoiser(pipe, num_steps=4, call={"height": 64, "width": 64, "guidance_scale": 4.0})
    prompts = ["a red circle", "a blue square"]
    with torch.no_grad():
        x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
        for i in range(4):
            x = x + (d.sigmas[i + 1] - d.sigmas[i]) * d.velocity(x, i, prompts)
    made = d.decode(x, prompts)
    pictures = [
        [Image.fromarray((255 * one.permute(1, 2, 0).numpy()).round().astype(np.uint8))] for one in made.clamp(0, 1)
    ]
    states, images = d.encode(pictures, prompts)
    again = d.decode(states, prompts)
    assert float((images - made).abs().max()) < 0.003
    assert -10 * math.log10(float((again - images).square().mean())) > 25
    # The state is the sampler's own, up to what the VAE loses; a wrong order of the numbers would give about 0.
    assert float(torch.corrcoef(torch.stack([states.flatten(), x.flatten()]))[0, 1]) > 0.75


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["FluxPipeline", "QwenImagePipeline", "Flux2Pipeline", "WanPipeline"])
def test_states_of_16_bits_reach_the_decoder(name: str, dtype: torch.dtype) -> None:
    tiny = TINY[name]
    pipe = tiny.fresh().to(dtype)
    d, prompts = Denoiser(pipe, num_steps=4, call=tiny.call), ["a cat", "a dog"]
    noise = np.random.default_rng(0).integers(0, 256, (2, 5, 40, 40, 3), dtype=np.uint8)
    count = 5 if name == "WanPipeline" else 1
    samples = [[Image.fromarray(frame) for frame in one[:count]] for one in noise]
    x, images = d.encode(samples, prompts)
    assert x.dtype == d.probe.dtype
    expected = encoded(pipe, images, 3 if name in ("QwenImagePipeline", "WanPipeline") else 2).float()
    reached: list[Tensor] = []
    decoding = pipe.vae.decode
    pipe.vae.__dict__["decode"] = lambda z, *a, **k: (reached.append(z), decoding(z, *a, **k))[1]
    d.decode(x, prompts)
    error = float((torch.cat(reached).float() - expected).abs().max() / expected.abs().max())
    assert error < (0.02 if dtype == torch.bfloat16 else 0.003)
