"""A cache of prompts that keeps a limited number of prompts."""

from typing import Any

import pytest
import torch

from flowgrpo.configs.schema import Recipe
from flowgrpo.pipelines.prompt_cache import PromptCache
from flowgrpo.training.model_paths import load_pipeline, model_folder
from flowgrpo.training.session import kept_prompts

pytestmark = pytest.mark.slow

CALL = {"height": 64, "width": 64, "guidance_scale": 1.0, "max_sequence_length": 0}


@pytest.fixture
def counting() -> tuple[Any, list[int]]:
    """The embedded pipeline, and how many texts its first encoder was given in each call."""
    pipe, rows = load_pipeline(model_folder("scenes"), torch.float32), []
    pipe.text_encoder.register_forward_hook(lambda module, given, output: rows.append(len(output[0])))
    return pipe, rows


def embedding(cache: PromptCache, prompt: str) -> torch.Tensor:
    found = cache.pipe.encode_prompt([prompt], None, None, max_sequence_length=0, do_classifier_free_guidance=False)
    return found[0].clone()


def test_the_prompt_asked_for_longest_ago_is_encoded_again_to_the_same_bits(counting: tuple[Any, list[int]]):
    pipe, rows = counting
    with PromptCache(pipe, CALL, most=2) as cache:
        first = embedding(cache, "a red circle")
        embedding(cache, "a blue square")
        rows.clear()
        embedding(cache, "a red circle")
        assert rows == []
        embedding(cache, "a green star")  # the blue square goes
        embedding(cache, "a red circle")
        assert rows == [1]
        embedding(cache, "a blue square")  # the green star goes
        embedding(cache, "a green star")  # the red circle goes
        assert rows == [1, 1, 1]
        assert torch.equal(embedding(cache, "a red circle"), first)
        assert rows == [1, 1, 1, 1]


def test_what_fits_into_the_spare_memory_is_kept_beyond_the_number(counting: tuple[Any, list[int]]):
    pipe, rows = counting
    prompts = ["a red circle", "a blue square", "a green star", "a red star"]
    with PromptCache(pipe, CALL) as cache:
        embedding(cache, prompts[0])
        size = cache._bytes
    with PromptCache(pipe, CALL, most=1, spare=3 * size) as cache:
        embedding(cache, prompts[0])
        rows.clear()
        for prompt in prompts[:3] * 2:
            embedding(cache, prompt)
        assert rows == [1, 1]  # three fit, whatever the number says
        embedding(cache, prompts[3])  # the first goes
        assert cache._bytes == 3 * size
        for prompt in prompts[1:]:
            embedding(cache, prompt)
        assert rows == [1, 1, 1]
        embedding(cache, prompts[0])
        assert rows == [1, 1, 1, 1]


def test_nothing_is_forgotten_without_a_limit_or_once_the_encoders_are_gone(counting: tuple[Any, list[int]]):
    pipe, rows = counting
    prompts = ["a red circle", "a blue square", "a green star"]
    with PromptCache(pipe, CALL) as cache:
        embedding(cache, prompts[0])
        rows.clear()
        for prompt in (*prompts, *prompts):
            embedding(cache, prompt)
        assert rows == [1, 1]
    with PromptCache(pipe, CALL, most=2) as cache:
        for prompt in prompts[:2]:
            embedding(cache, prompt)
        cache.release()
        for prompt in prompts[:2]:
            embedding(cache, prompt)


def test_two_iterations_and_an_evaluation_are_kept_and_all_that_cannot_be_encoded_again():
    plain = {"rewards": [{"name": "gold"}], "rollout": {"prompts": 8}, "model": {"release_text_encoders": False}}
    assert kept_prompts(Recipe.model_validate(plain), 20) == 8 + 8 + 20 + 1
    templated = {**plain, "data": {"templates": ["{prompt}", "{prompt}, drawn"]}}
    assert kept_prompts(Recipe.model_validate(templated), 20) == 16 + 16 + 20 + 1
    assert kept_prompts(Recipe.model_validate({**plain, "model": {"release_text_encoders": True}}), 20) is None
