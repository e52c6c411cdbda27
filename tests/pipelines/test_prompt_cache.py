"""Cached prompt embeddings against those a pipeline makes itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowgrpo.pipelines.conformance.conform import TINY as CLASSES
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.joining import joined, layout_of
from flowgrpo.pipelines.prompt_cache import PromptCache
from tests.tiny_pipelines import CALL, TINY, require

KEYS = tuple(TINY)
PROMPTS = ["a photo of two red circles above a green square", "a star", "three blue triangles"]


@functools.cache
def tiny(key: str) -> Any:
    return TINY[key]()


@pytest.fixture(params=KEYS)
def key(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def cache(key: str) -> Iterator[PromptCache]:
    with PromptCache(tiny(key), CALL[key]) as made:
        yield made


def latents(pipe: Any, key: str, prompts: list[str]) -> torch.Tensor:
    call = dict(CALL[key])
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    generators = [torch.Generator().manual_seed(k) for k in range(len(prompts))]
    result: torch.Tensor = pipe(
        prompt=prompts,
        num_inference_steps=2,
        generator=generators,
        output_type="latent",
        return_dict=False,
        **call,
    )[0]
    return result


class Calls:
    """Counts forwards of a pipeline's text encoders, and the grad mode they ran in."""

    def __init__(self, pipe: Any) -> None:
        self.grad: list[bool] = []
        encoders = [part for name, part in pipe.components.items() if name.startswith("text_encoder")]
        self.handles = [
            encoder.register_forward_hook(lambda *_: self.grad.append(torch.is_grad_enabled())) for encoder in encoders
        ]

    def taken(self) -> list[bool]:
        seen, self.grad = self.grad, []
        return seen


@pytest.mark.slow
def test_cached_prompts_give_the_plain_result(key: str) -> None:
    pipe = tiny(key)
    plain, alone = latents(pipe, key, PROMPTS), latents(pipe, key, PROMPTS[:1])
    with PromptCache(pipe, CALL[key]):
        torch.testing.assert_close(latents(pipe, key, PROMPTS), plain, rtol=1e-4, atol=1e-5)
        assert torch.equal(latents(pipe, key, PROMPTS[:1]), alone)
        # Another order, other neighbours, a repetition: put together from the same entries.
        mixed = latents(pipe, key, [PROMPTS[1], PROMPTS[1], PROMPTS[0]])
    torch.testing.assert_close(mixed, latents(pipe, key, [PROMPTS[1], PROMPTS[1], PROMPTS[0]]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_prompt_is_encoded_once_and_without_gradient(key: str, cache: PromptCache) -> None:
    calls = Calls(cache.pipe)
    d = Denoiser(cache.pipe, num_steps=2, call=CALL[key], variant="direct")
    x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(3)])
    cache.encode(PROMPTS)
    first = calls.taken()
    cache.encode(PROMPTS)
    predicted = d.velocity(x, 0, PROMPTS)
    latents(cache.pipe, key, PROMPTS[::-1])

    assert first
    assert not any(first)
    assert calls.taken() == []
    assert cache.prompts == tuple(PROMPTS)
    predicted.sum().backward()
    parts = [part for name, part in cache.pipe.components.items() if name.startswith("text_encoder")]
    assert all(p.grad is None for part in parts for p in part.parameters())
    cache.pipe.transformer.zero_grad(set_to_none=True)
    for handle in calls.handles:
        handle.remove()


@pytest.mark.slow
def test_encoders_can_leave_once_prompts_are_cached(key: str, cache: PromptCache) -> None:
    pipe = cache.pipe
    encoders = {name: part for name, part in pipe.components.items() if name.startswith("text_encoder")}
    config = dict(pipe.config)
    plain = latents(pipe, key, PROMPTS)
    cache.encode(PROMPTS)
    cache.release()

    assert encoders
    assert not any(isinstance(getattr(pipe, name), torch.nn.Module) for name in encoders)
    assert torch.equal(latents(pipe, key, PROMPTS), plain)
    d = Denoiser(pipe, num_steps=2, call=CALL[key])
    x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(3)])
    assert d.velocity(x, 0, PROMPTS).requires_grad
    with pytest.raises(ValueError, match=r"'a new prompt'.*PromptCache.encode"):
        d.velocity(x[:1], 0, ["a new prompt"])
    with pytest.raises(ValueError, match=r"'another'.*PromptCache.encode"):
        cache.encode(["another"])

    cache.close()
    assert all(getattr(pipe, name) is encoder for name, encoder in encoders.items())
    assert "encode_prompt" not in pipe.__dict__
    assert dict(pipe.config) == config
    assert d.velocity(x[:1], 0, ["a new prompt"]).isfinite().all()


@pytest.mark.slow
def test_prompts_are_kept_for_calls_with_other_arguments_too() -> None:
    """Guidance also encodes the negative prompt; the features of a prompt are those of the call without guidance."""
    pipe, call = tiny("sd3"), {**CALL["sd3"], "guidance_scale": 1.0}
    guided = {**call, "guidance_scale": 4.0}
    before = Denoiser(pipe, num_steps=2, call=guided, example=PROMPTS[0])
    x = torch.randn(1, *before.probe.latent_shape, generator=torch.Generator().manual_seed(0))
    expected = before.velocity(x, 0, PROMPTS[:1])
    with PromptCache(pipe, call) as plain:
        features = plain.features(PROMPTS[1])
    with PromptCache(pipe, call, changes=[{"guidance_scale": 4.0}], most=1) as cache:
        cache.encode(PROMPTS)
        assert cache.most == len(cache._entries) == 2
    # A size, or another strength of guidance, encodes nothing in a new way.
    with PromptCache(pipe, call, changes=[{"height": 64}], most=1) as cache:
        cache.encode(PROMPTS)
        assert cache.most == len(cache._entries) == 1
    with PromptCache(
        pipe, guided, changes=[{"guidance_scale": 3.0}, {"negative_prompt": "a green hat"}], most=1
    ) as cache:
        cache.encode(PROMPTS)
        assert cache.most == len(cache._entries) == 2
    with PromptCache(pipe, call, changes=[{"guidance_scale": 4.0}]) as cache:
        cache.encode(PROMPTS)
        cache.release()
        found = Denoiser(pipe, num_steps=2, call=guided, example=PROMPTS[0]).velocity(x, 0, PROMPTS[:1])
        Denoiser(pipe, num_steps=2, call=call, example=PROMPTS[0]).velocity(x, 0, PROMPTS[:1])
        assert torch.equal(cache.features(PROMPTS[1]), features)
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_released_for_good_leaves_none() -> None:
    pipe = TINY["flux"]()
    cache = PromptCache(pipe, CALL["flux"], device="cpu")
    cache.encode(PROMPTS)
    dtype = pipe.text_encoder.dtype
    cache.release(["text_encoder_2"], keep=False)

    assert pipe.text_encoder_2.dtype == dtype
    assert pipe.text_encoder_2.device.type == "cpu"
    assert isinstance(pipe.text_encoder, torch.nn.Module)
    with pytest.raises(ValueError, match=r"text_encoder_2 has been released.*model\.release_text_encoders: false"):
        pipe.text_encoder_2(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="no module named 'text_encoder_9'"):
        cache.release(["text_encoder_9"])
    cache.close()
    assert pipe.text_encoder_2 is None


@pytest.mark.slow
def test_an_embedding_does_not_depend_on_its_neighbours() -> None:
    pipe = tiny("qwenimage")
    with PromptCache(pipe, CALL["qwenimage"]):
        (alone, no_mask), (beside, mask) = pipe.encode_prompt(PROMPTS[1:2]), pipe.encode_prompt(PROMPTS)
        (twice, still_none) = pipe.encode_prompt([PROMPTS[1], PROMPTS[1]])
    length = alone.shape[1]

    assert no_mask is None
    assert still_none is None
    assert twice.shape[1] == length < beside.shape[1]
    assert torch.equal(beside[1, :length], alone[0])
    assert not beside[1, length:].any()
    # Qwen-Image leaves the mask out where it would be all ones, so a batch has to bring it back.
    plain, plain_mask = pipe.encode_prompt(PROMPTS)
    assert torch.equal(mask, plain_mask)
    assert mask.dtype == plain_mask.dtype
    torch.testing.assert_close(beside, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_other_arguments_make_other_entries() -> None:
    pipe = tiny("flux")
    with PromptCache(pipe, CALL["flux"]):
        long, pooled, ids = pipe.encode_prompt(PROMPTS, max_sequence_length=16)
        short, _, short_ids = pipe.encode_prompt(PROMPTS, max_sequence_length=8)
        one, _, _ = pipe.encode_prompt(PROMPTS[0], max_sequence_length=16)
        swapped, _, _ = pipe.encode_prompt(PROMPTS, prompt_2=PROMPTS[::-1], max_sequence_length=16)
        with pytest.raises(ValueError, match="num_images_per_prompt is 2"):
            pipe.encode_prompt(PROMPTS, num_images_per_prompt=2)
        with pytest.raises(ValueError, match="prompt_2 has 1 texts but prompt has 3"):
            pipe.encode_prompt(PROMPTS, prompt_2=["a"])
        given = pipe.encode_prompt(None, prompt_embeds=long + 1, pooled_prompt_embeds=pooled)[0]

    assert long.shape == (3, 16, 32)
    assert short.shape == (3, 8, 32)
    assert pooled.shape == (3, 16)
    assert ids.shape == (16, 3)
    assert short_ids.shape == (8, 3)
    assert torch.equal(one, long[:1])
    assert torch.equal(swapped, long.flip(0))
    assert torch.equal(given, long + 1)


@pytest.mark.slow
def test_texts_that_go_in_as_one_list_are_kept_together() -> None:
    """DreamLite encodes `prompts=[negative, "[Generate]: " + prompt]`, padded to the longer of the two."""
    require("DreamLitePipeline")
    made = CLASSES["DreamLitePipeline"]
    pipe = made.fresh()
    d = Denoiser(pipe, num_steps=2, call=made.call)
    x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    calls = Calls(pipe)
    with torch.no_grad():
        plain = d.velocity(x, 0, ["a star", "not a star"])
        calls.taken()
        with PromptCache(pipe, made.call) as cache:
            cache.encode(["not a star", "a star"])
            cache.release()
            assert len(calls.taken()) == 2
            assert torch.equal(d.velocity(x, 0, ["a star", "not a star"]), plain)
            assert calls.taken() == []
            assert not torch.equal(cache.features("a star"), cache.features("not a star"))
            assert cache.features("a star").shape == (16,)
            with pytest.raises(ValueError, match=r"'\[Generate\]: a new prompt'.*PromptCache.encode"):
                d.velocity(x[:1], 0, ["a new prompt"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"])
def test_a_negative_prompt_that_is_left_out_is_kept_like_an_empty_one(kind: str) -> None:
    made = CLASSES[f"{kind}, no negative"]
    pipe = made.fresh()
    if made.adjust is not None:
        made.adjust(pipe)
    d = Denoiser(pipe, num_steps=2, call=made.call)
    x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    calls = Calls(pipe)
    with torch.no_grad():
        plain = d.velocity(x, 0, PROMPTS[:2])
        with PromptCache(pipe, made.call) as cache:
            cache.encode(PROMPTS[:2])
            cache.release()
            calls.taken()
            torch.testing.assert_close(d.velocity(x, 0, PROMPTS[:2]), plain, rtol=1e-4, atol=1e-5)
            assert calls.taken() == []
        empty = Denoiser(pipe, num_steps=2, call={**made.call, "negative_prompt": ""})
        assert torch.equal(empty.velocity(x, 0, PROMPTS[:2]), plain)


@pytest.mark.slow
def test_a_cache_is_refused_where_it_cannot_work() -> None:
    pipe = TINY["flux"]()
    with PromptCache(pipe, CALL["flux"]), pytest.raises(ValueError, match="close that cache first"):
        PromptCache(pipe, CALL["flux"])
    with pytest.raises(ValueError, match="no argument 'widht'"):
        PromptCache(pipe, {"widht": 16})


def outputs(*lengths: int) -> tuple[Any, ...]:
    """One output of each kind found in diffusers, for prompts of the given lengths."""
    longest = max(lengths)
    rows = torch.zeros(len(lengths), longest, 2)
    layers = torch.zeros(3, len(lengths), longest, 2)
    for k, length in enumerate(lengths):
        rows[k, :length] = layers[:, k, :length] = float(length)
    mask = torch.tensor([[j < length for j in range(longest)] for length in lengths])
    items = [torch.full((length, 2), float(length)) for length in lengths]
    return (
        rows,
        None if mask.all() else mask,
        layers,
        items,
        None,
        torch.arange(longest)[:, None].expand(longest, 3),
    )


def test_every_kind_of_output_is_joined_as_the_pipeline_would() -> None:
    layout = layout_of(outputs(1), outputs(1, 4))
    for lengths in ((2, 5, 3), (4, 4), (1,)):
        batch = joined(layout, [outputs(length) for length in lengths])
        for found, expected in zip(batch, outputs(*lengths), strict=True):
            if isinstance(expected, list):
                assert len(found) == len(expected)
                assert all(map(torch.equal, found, expected))
            else:
                assert found is expected is None or torch.equal(found, expected)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_mask_is_as_long_as_its_prompts_wherever_their_tokens_stand(pooled: bool) -> None:
    """BRIA Fibo 2 stacks several layers before the tokens: [B, layers, L, D]. A pooled embedding has no length."""

    def encoded(*lengths: int) -> tuple[Any, ...]:
        even = len(set(lengths)) == 1
        mask = torch.tensor([[j < length for j in range(max(lengths))] for length in lengths])
        layers = torch.ones(len(lengths), 2, max(lengths), 4)
        for k, length in enumerate(lengths):
            layers[k, :, length:] = 0.0
        return (layers, *([torch.ones(len(lengths), 4)] if pooled else []), None if even else mask)

    layout = layout_of(encoded(3), encoded(3, 5))
    found = joined(layout, [encoded(length) for length in (2, 4, 3)])
    assert torch.equal(found[0], encoded(2, 4, 3)[0])
    assert found[-1].tolist() == [[True, True, False, False], [True] * 4, [True, True, True, False]]
    assert joined(layout, [encoded(4), encoded(4)])[-1] is None


@pytest.mark.parametrize("probe", [4, 3])
def test_a_prompt_that_is_padded_on_its_own_keeps_its_mask(probe: int) -> None:
    """Nucleus pads to a multiple (here of 4) and omits a mask of ones, so a single prompt may have no mask."""

    def encoded(*lengths: int) -> tuple[Any, ...]:
        padded = -(-max(lengths) // 4) * 4
        mask = torch.tensor([[int(j < length) for j in range(padded)] for length in lengths])
        tokens = torch.zeros(len(lengths), padded, 2)
        for k, length in enumerate(lengths):
            tokens[k, :length] = float(length)
        return tokens, None if mask.all() else mask

    layout = layout_of(encoded(probe), encoded(probe, 6))
    for lengths in ((4, 4), (3, 2), (3, 4), (4, 8), (3, 8, 4, 5), (2,), (8,)):
        tokens, mask = joined(layout, [encoded(length) for length in lengths])
        expected_tokens, expected = encoded(*lengths)
        assert torch.equal(tokens, expected_tokens)
        assert mask is expected is None or torch.equal(mask, expected)


def test_a_second_prompt_has_a_mask_of_its_own() -> None:
    """Embeddings for guidance: positive prompts of two lengths, and one negative prompt for both."""
    layout = layout_of((torch.ones(1, 3, 4), None, torch.ones(1, 2, 4), None),
                       (torch.ones(2, 5, 4), torch.ones(2, 5), torch.ones(2, 5, 4), torch.ones(2, 5)))  # fmt: skip
    one, two = ((torch.ones(1, length, 4), None, torch.ones(1, 2, 4), None) for length in (3, 4))
    _, mask, _, negative_mask = joined(layout, [one, two])
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert negative_mask is None


def test_an_output_that_cannot_be_split_by_prompt_is_refused() -> None:
    first, second = (torch.zeros(1, 2), torch.ones(4)), (torch.zeros(1, 2), torch.zeros(4))
    layout = layout_of(first, (torch.zeros(2, 2), torch.ones(4)))
    with pytest.raises(ValueError, match="not batched, yet differs"):
        joined(layout, [first, second])


def test_sums_of_lengths_are_summed_anew() -> None:
    """Kandinsky 5 says where each prompt ends in the row of all prompts' tokens: 0, 3, 3 + 5."""
    layout = layout_of(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32))
    ends = joined(layout, [torch.tensor([0, length], dtype=torch.int32) for length in (3, 5, 2)])
    assert ends.tolist() == [0, 3, 8, 10]
    assert ends.dtype == torch.int32
