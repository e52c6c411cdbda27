"""Pictures that condition a pipeline: encoded once, told apart by content, and one for each prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.pipelines.capture import ConditionedPrompt, company, kin
from flowgrpo.pipelines.conformance.conditioned import picture
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.encodings import encodings_of, fingerprint
from flowgrpo.pipelines.prompt_cache import PromptCache

pytestmark = pytest.mark.slow


def counted(module: Any, name: str) -> list[int]:
    """Counts calls of a method from now on."""
    calls: list[int] = []
    own = getattr(module, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    setattr(module, name, counting)
    return calls


def denoiser(name: str, pipe: Any = None, **options: Any) -> Denoiser:
    case = TINY[name]
    return Denoiser(case.fresh() if pipe is None else pipe, num_steps=case.steps, call=options.pop("call", case.call),
                    **options)  # fmt: skip


@pytest.mark.parametrize("name", ["WanImageToVideoPipeline", "FluxKontextPipeline"])
def test_a_picture_is_encoded_once_for_a_whole_run(name: str) -> None:
    pipe = TINY[name].fresh()
    encoded = counted(pipe.vae, "encode")
    seen = counted(pipe.image_encoder, "forward") if name.startswith("Wan") else []
    made = denoiser(name, pipe)
    made.self_check(["a star", "a circle"])
    x = made.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    for i in range(3):
        made.velocity(x, i, ["a star", "a circle"])
    made.decode(x, ["a star", "a circle"])

    assert len(encoded) == 1
    assert len(seen) in (0, 1)
    assert "encode" in pipe.vae.__dict__  # the counter: what was put there is off again


def test_a_posterior_sampled_without_a_generator_stays_the_same() -> None:
    made = denoiser("CogView4ControlPipeline")
    assert made.self_check(["a star", "a circle"]) == "direct"


def test_prompts_with_pictures_of_their_own_are_evaluated_each_with_its_own() -> None:
    case = TINY["FluxKontextPipeline"]
    call = {name: value for name, value in case.call.items() if name != "image"}
    stripes, dots = picture(16), picture(16, phase=5)
    prompts = [
        ConditionedPrompt("make it red", image=stripes),
        ConditionedPrompt("make it red", image=dots),
        ConditionedPrompt("a star", image=stripes),
    ]
    both = denoiser("FluxKontextPipeline", call=call, example=prompts[0])
    x = both.initial_noise([torch.Generator().manual_seed(k) for k in range(3)])
    with torch.no_grad():
        together = both.velocity(x, 1, prompts)
        for rows, image in (([0, 2], stripes), ([1], dots)):
            alone = denoiser("FluxKontextPipeline", call={**call, "image": image}, variant=both.variant)
            assert torch.equal(together[rows], alone.velocity(x[rows], 1, [str(prompts[row]) for row in rows]))
        images = both.decode(x, prompts)

    assert not torch.equal(together[0], both.velocity(x, 1, [prompts[1], *prompts[1:]])[0])
    assert len(images) == 3


def test_a_prompt_is_its_text() -> None:
    prompt = ConditionedPrompt("a star", image=picture())
    assert prompt == "a star"
    assert hash(prompt) == hash("a star")
    assert set(prompt.call) == {"image"}


def test_an_argument_that_a_pipeline_lacks_is_named() -> None:
    made = denoiser("StableDiffusion3Pipeline", variant="direct")
    x = made.initial_noise([torch.Generator().manual_seed(0)])
    with pytest.raises(ValueError, match="no argument 'image'"):
        made.velocity(x, 0, [ConditionedPrompt("a star", image=picture())])


def test_rows_are_put_together_by_what_one_call_can_hold() -> None:
    a, b = picture(8), picture(8, phase=3)
    prompts = [ConditionedPrompt("x", image=a), ConditionedPrompt("y", image=b), ConditionedPrompt("z", image=a), "x"]
    assert kin(prompts, "all") == [[0, 2], [1], [3]]
    assert kin(["x", "y", "x"], "all") == [[0, 1, 2]]
    assert kin(["x", "y", "x"], "prompt") == [[0, 2], [1]]
    assert kin(["x", "y", "x"], "one") == [[0], [1], [2]]
    assert company(["x", "y"], "all") == ["x", "y"]
    assert company(["x", "y"], "prompt") == ["x", "x"]
    assert company(["x", "y"], "one") == ["x"]


def test_fingerprints_tell_contents_apart() -> None:
    values: list[Any] = [
        None, 0, 1, 1.0, True, "1", torch.zeros(2), torch.zeros(3), torch.ones(2), torch.zeros(2, dtype=torch.int32),
        picture(8), picture(8, phase=1), picture(8).convert("L"), [1, 2], [2, 1], {"a": 1}, {"b": 1}, torch.tensor(1.0),
    ]  # fmt: skip
    marks = [fingerprint(value) for value in values]
    assert len(set(marks)) == len(values)
    assert fingerprint(torch.ones(4, 4)[:, 1]) == fingerprint(torch.ones(4))
    assert fingerprint(Image.fromarray(np.array(picture(8)))) == fingerprint(picture(8))
    # A dimension of one element has no use for its stride.
    odd = torch.ones(6).as_strided((2, 1), (1, 3))
    assert fingerprint(odd) == fingerprint(torch.ones(2, 1))
    assert fingerprint(torch.tensor(1.0, dtype=torch.bfloat16)) != fingerprint(torch.tensor(2.0, dtype=torch.bfloat16))
    assert fingerprint(torch.Generator()) is None
    assert fingerprint([1, object()]) is None


def test_only_the_latest_encodings_are_kept() -> None:
    pipe = TINY["FluxKontextPipeline"].fresh()
    calls = counted(pipe.vae, "encode")
    with encodings_of(pipe).active():
        for level in (0.0, 0.5, 0.0):
            pipe.vae.encode(torch.full((1, 3, 16, 16), level))
    assert len(calls) == 2
    with encodings_of(pipe).active():
        for number in range(130):
            pipe.vae.encode(torch.full((1, 3, 16, 16), 1.0 + number))
        pipe.vae.encode(torch.zeros(1, 3, 16, 16))
    assert len(calls) == 2 + 130 + 1


def test_one_picture_for_each_row_where_the_class_wants_that() -> None:
    """SD3's image-to-image slices its pictures by row."""
    made = denoiser("StableDiffusion3Img2ImgPipeline")
    x = made.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    with torch.no_grad():
        both = made.velocity(x, 0, ["a star", "a circle"])
        one = made.velocity(x[1:], 0, ["a circle"])
    torch.testing.assert_close(both[1:], one, rtol=1e-4, atol=1e-5)


def test_the_batch_that_a_pipeline_names_is_not_that_of_the_cache() -> None:
    """HunyuanImage tells its encode_prompt how many prompts there are; the cache encodes one at a time."""
    case = TINY["HunyuanImagePipeline"]
    pipe = case.fresh()
    assert case.adjust is not None
    case.adjust(pipe)
    made = denoiser("HunyuanImagePipeline", pipe, variant="direct")
    x = made.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    prompts = ["a star", "a photo of two red circles"]
    with torch.no_grad():
        plain = made.velocity(x, 1, prompts)
        with PromptCache(pipe, case.call) as cache:
            cache.encode(prompts)
            torch.testing.assert_close(made.velocity(x, 1, prompts), plain, rtol=1e-4, atol=1e-5)
