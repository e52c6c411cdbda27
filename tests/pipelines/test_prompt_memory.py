"""A cache of prompts that keeps a limited number of prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.pipelines.prompt_cache import PromptCache
from flowgrpo.training.data import Data, PromptRow, PromptStream
from flowgrpo.training.model_paths import load_pipeline, model_folder
from flowgrpo.training.prompt_embeddings import kept_prompts, met_prompts
from flowgrpo.training.session import start

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


def stream_of(count: int) -> Data:
    return Data(PromptStream([PromptRow(k, f"prompt {k}") for k in range(count)], seed=3), [PromptRow(0, "held out")])


def test_of_a_long_file_only_the_prompts_that_the_run_draws_are_encoded():
    plain = {"rewards": [{"name": "gold"}], "rollout": {"prompts": 4}, "run": {"iterations": 5}}
    data = stream_of(1000)
    found = met_prompts(Recipe.model_validate(plain), data)
    texts = [row.text for row in found]
    assert texts[:2] == ["prompt 0", "prompt 1"]
    assert texts[-1] == "held out"
    drawn = {row.text for iteration in range(5) for row in data.train.take(4 * iteration, 4)}
    assert set(texts) == drawn | {"prompt 0", "prompt 1", "held out"}
    assert len(texts) == len(set(texts)) <= 23
    short = stream_of(20)
    assert [row.text for row in met_prompts(Recipe.model_validate(plain), short)[:-1]] == [
        row.text for row in short.train.rows
    ]
    chosen = Recipe.model_validate({**plain, "extensions": [{"name": "curriculum"}]})
    assert len(met_prompts(chosen, data)) == 1001


def test_a_run_on_a_long_file_encodes_what_it_draws(tmp_path: Path):
    (tmp_path / "long.txt").write_text("".join(f"a red circle and {k} stars\n" for k in range(2000)))
    words = [
        f"data.train={tmp_path / 'long.txt'}", "data.heldout=null", "model.release_text_encoders=true",
        "rollout={prompts: 2, group: 2, batch: 4}", "run.iterations=2", "rewards=[{name: jpeg_compressibility}]",
        "evaluate={}",
    ]  # fmt: skip
    told: list[tuple[str, int, int]] = []
    session = start(
        load_recipe("mixgrpo", words),
        tmp_path / "run",
        doing=lambda text, *more: told.append((text, *more)) if more else 0,
    )
    assert {total for text, _, total in told if text == "encoding prompts"} <= {4, 5, 6}
    session.trainer(Silent()).train()
