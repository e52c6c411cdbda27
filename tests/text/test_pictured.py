"""Prompts that show pictures: positions, padding and gradients of each family of models, and what a bad input says."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo.pipelines.pictures import Picture
from flowgrpo.text.model import LanguageModel, linear_layers, load_language_model
from flowgrpo.text.picture_marks import MARK, PART
from flowgrpo.text.pictured import PicturedIds, followed, identity, with_parts
from flowgrpo.text.prompt_batch import PromptBatch
from flowgrpo.text.sampling import sample_completions
from flowgrpo.text.scoring import completion_log_probs
from flowgrpo.text.sight_check import check_sight
from tests.text.tiny_seeing import FAMILIES, put_tiny_seeing

OWNER = [0, 0, 1, 1, 2, 3]
WITHIN = 1e-4
KEYS = [11, 12, 13, 14, 15, 16]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Picture]:
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    found = []
    for number, (height, width) in enumerate(((60, 40), (90, 120), (30, 30))):
        path = folder / f"{number}.png"
        Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype="uint8")).save(path)
        found.append(Picture(path))
    return found


@pytest.fixture(scope="session", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = put_tiny_seeing(request.param, tmp_path_factory.mktemp("seeing") / request.param)
    return load_language_model(str(folder), pictures=True)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = put_tiny_seeing("qwen2_5_vl", tmp_path_factory.mktemp("seeing") / "qwen")
    return load_language_model(str(folder), pictures=True)


def prompts_of(language: LanguageModel, pictures: list[Picture]) -> list[list[int]]:
    """A prompt with a picture, one with two, one with another, and one with none; no two are equally long."""
    return [
        language.encode("12+3=", None, pictures[0]),
        language.encode("123+3=", None, pictures[1:]),
        language.encode("1+", None, pictures[2]),
        language.encode("9+9="),
    ]


def own_log_probs(language: LanguageModel, prompt: list[int], ids: list[int]) -> Tensor:
    """[T] log-probs by the model's own call, with what its processor makes of one prompt and no padding."""
    whole = torch.tensor([[*prompt, *ids]])
    more: dict[str, Any] = {}
    if isinstance(prompt, PicturedIds):
        more = dict(prompt.inputs)
        for name, kinds in prompt.kinds.items():
            more[name] = torch.cat([kinds, torch.zeros(len(ids), dtype=kinds.dtype)])[None]
    with torch.no_grad():
        logits = language.model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False, **more).logits
    chances = language.said(logits)[0].double().log_softmax(-1)
    return chances[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_sampling_and_scoring_agree_with_the_models_own_call(seeing: LanguageModel, pictures: list[Picture]) -> None:
    prompts = prompts_of(seeing, pictures)
    assert len({len(prompt) for prompt in prompts}) > 2
    found = sample_completions(seeing, prompts, OWNER, KEYS, max_tokens=5)
    for shared in (True, False):
        scored, mask = completion_log_probs(seeing, prompts, found.ids, OWNER, shared_prefix=shared)
        for row, (ids, owner) in enumerate(zip(found.ids, OWNER)):
            wanted = own_log_probs(seeing, prompts[owner], ids).tolist()
            assert scored[row, mask[row]].tolist() == pytest.approx(wanted, abs=WITHIN)
            assert found.log_probs[row] == pytest.approx(wanted, abs=WITHIN)


def test_a_completion_depends_on_its_pictures_and_not_on_its_batch(
    seeing: LanguageModel, pictures: list[Picture]
) -> None:
    prompts = prompts_of(seeing, pictures)
    together = sample_completions(seeing, prompts, OWNER, KEYS, max_tokens=5)
    alone = sample_completions(seeing, prompts[2:3], [0], KEYS[4:5], max_tokens=5)
    assert alone.ids == together.ids[4:5]
    other = seeing.encode("1+", None, Picture(pictures[2].path.parent / "0.png"))
    ids = together.ids[4:5]
    mine, another = (completion_log_probs(seeing, [one], ids, [0])[0] for one in (prompts[2], other))
    assert not torch.allclose(mine, another, atol=1e-7)


def test_a_shared_prefix_has_the_gradient_of_the_plain_path(seeing: LanguageModel, pictures: list[Picture]) -> None:
    prompts = prompts_of(seeing, pictures)
    ids = [[5, 6, 7], [8], [9, 5], [6, 6, 6], [7, 8], [5]]
    found = []
    for shared in (True, False):
        seeing.model.zero_grad()
        log_probs, _ = completion_log_probs(seeing, prompts, ids, OWNER, shared_prefix=shared)
        log_probs.sum().backward()
        found.append({name: p.grad.clone() for name, p in seeing.model.named_parameters() if p.grad is not None})
    seeing.model.zero_grad()
    assert found[0].keys() == found[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in found[1].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=1e-5 * largest, msg=name)


def test_the_check_at_the_start_of_a_run_passes(seeing: LanguageModel, pictures: list[Picture]) -> None:
    check_sight(seeing, seeing.encode("12+3=", None, pictures[1]))  # type: ignore[arg-type]


def test_the_check_finds_positions_that_are_not_the_models(
    qwen: LanguageModel, pictures: list[Picture], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = qwen.encode("12+3=", None, pictures[1])
    assert isinstance(prompt, PicturedIds)
    assert prompt.places is not None
    counted = PicturedIds(prompt, prompt.inputs, prompt.kinds, None)
    with pytest.raises(ValueError, match="gives other log-probs to a prompt with pictures in a batch than alone"):
        check_sight(qwen, counted)


def test_tokens_of_pictures_are_never_drawn(seeing: LanguageModel, pictures: list[Picture]) -> None:
    prompts = prompts_of(seeing, pictures)[:1]
    assert set(seeing.unsaid) & set(prompts[0])
    found = sample_completions(seeing, prompts, [0] * 64, list(range(64)), max_tokens=6, temperature=5.0)
    assert not set(seeing.unsaid) & {token for ids in found.ids for token in ids}


def test_a_lora_is_on_the_layers_of_text_alone(seeing: LanguageModel) -> None:
    names = linear_layers(seeing.model)
    assert len(names) >= 14  # seven or more in each of two layers
    assert all("language_model" in name or "text_model" in name for name in names)


def test_positions_in_time_height_and_width() -> None:
    places = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    shown = PicturedIds([5, 6, 6, 6, 6, 7], {}, {}, places)
    batch = PromptBatch([shown, [8, 9]], 0, torch.device("cpu"), torch.float32)
    assert batch.positions()[:, 0].tolist() == places.tolist()
    assert batch.positions()[:, 1].tolist() == [[0, 0, 0, 0, 0, 1]] * 3
    # Six tokens end at position 3, so the next one is at 4; two tokens of text are followed by position 2.
    assert batch.shift is not None
    assert batch.shift.tolist() == [[-2, 0]] * 3


def test_ids_go_on_after_a_prompt_with_pictures(pictures: list[Picture]) -> None:
    places = torch.tensor([[0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    kinds, inputs = {"token_type_ids": torch.tensor([0, 1, 1, 1, 1, 0])}, {"pixel_values": torch.ones(1)}
    shown = PicturedIds([5, 6, 6, 6, 6, 7], inputs, kinds, places, pictures[:1])
    longer = followed(shown, [8, 9])
    assert followed([5, 6], [7]) == [5, 6, 7]
    assert isinstance(longer, PicturedIds)
    assert list(longer) == [5, 6, 6, 6, 6, 7, 8, 9]
    assert longer.places is not None
    assert longer.places[:, -3:].tolist() == [[2, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert longer.kinds["token_type_ids"].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert longer.inputs is inputs
    other = PicturedIds(shown, inputs, kinds, places, pictures[1:2])
    assert shown == PicturedIds(shown, {}, {}, None, pictures[:1])
    assert shown != other
    assert shown != list(shown)
    assert len({identity(one) for one in (shown, other, list(shown), longer)}) == 4


def test_where_pictures_stand_in_a_conversation() -> None:
    talk = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": "It is"},
    ]
    shown = with_parts(talk, 2)
    assert [part["type"] for part in shown[1]["content"]] == ["image", "image", "text"]
    assert [message["content"] for message in (shown[0], shown[2])] == [
        [{"type": "text", "text": "look"}], [{"type": "text", "text": "It is"}]
    ]  # fmt: skip
    marked = with_parts([{"role": "user", "content": f"from {MARK} to {MARK}"}], 2)
    assert [part.get("text", "-") for part in marked[0]["content"]] == ["from ", "-", " to ", "-"]
    assert with_parts([{"role": "user", "content": f"from {PART} to {PART}"}], 2) == marked
    with pytest.raises(ValueError, match="a prompt has 2 times <image> and 1 picture; write <image> once for each"):
        with_parts([{"role": "user", "content": f"from {MARK} to {MARK}"}], 1)


def test_tokens_of_a_picture_that_is_lost_are_refused(qwen: LanguageModel, pictures: list[Picture]) -> None:
    lost = list(qwen.encode("12+3=", None, pictures[0]))
    with pytest.raises(ValueError, match="tokens of pictures without its pictures"):
        sample_completions(qwen, [lost], [0], [1], max_tokens=2)


def test_a_model_that_only_sees_names_the_key(tmp_path: Path) -> None:
    folder = put_tiny_seeing("qwen2_vl", tmp_path / "model")
    with pytest.raises(ValueError, match=r"is a language model that is shown pictures; write model\.pictures: true"):
        load_language_model(str(folder))


def test_a_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    folder = put_tiny_seeing("qwen2_vl", tmp_path / "model")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"model\.pictures needs .*preprocessor_config\.json among them"):
        load_language_model(str(folder), pictures=True)


def test_a_processor_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = put_tiny_seeing("llava", tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="needs a chat template, and the processor has none"):
        load_language_model(str(folder), pictures=True)


def test_a_model_that_fails_with_batches_is_refused_by_its_error(
    qwen: LanguageModel, pictures: list[Picture], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AttributeError("no image_outputs")

    prompt = qwen.encode("12+3=", None, pictures[1])
    monkeypatch.setattr(type(qwen.model), "forward", fails)
    with pytest.raises(
        ValueError, match=r"cannot be trained with model\.pictures: .* \(AttributeError: no image_outputs\)"
    ):
        check_sight(qwen, prompt)  # type: ignore[arg-type]


def test_tokens_that_stand_for_pictures_with_pictures_alone_are_never_drawn(qwen: LanguageModel) -> None:
    """As the indicators of Ovis 2, whose embeddings are others where a picture is given."""
    other = replace(
        qwen, model=SimpleNamespace(config=SimpleNamespace(image_token_id=7, visual_indicator_token_ids=[8, 9]))
    )
    assert other.unsaid == (7, 8, 9)
