"""Sampling of completions: the right distribution, addressed seeds, and no influence of neighbours in the batch."""

import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flowgrpo.core.categorical import pick
from flowgrpo.text.model import LanguageModel
from flowgrpo.text.prompt_batch import PromptBatch
from flowgrpo.text.sampling import (
    completion_keys,
    filtered,
    sample_completions,
    stopping,
)
from flowgrpo.text.scoring import completion_log_probs

PROMPTS = ["1+2=", "47-85=", "9", "30+4="]


def test_pick_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(6, 3)
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.749, 0.751, 0.999], dtype=torch.float64)
    token, chance = pick(logits, uniform)
    assert token.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.allclose(chance, torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]).double().log(), atol=1e-6)


def test_pick_never_takes_a_token_without_mass() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    token, _ = pick(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert token.tolist() == [1, 3, 3]


def test_pick_follows_the_distribution() -> None:
    chances = torch.tensor([0.1, 0.6, 0.3])
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token, _ = pick(chances.log().expand(20_000, 3), uniform)
    found = torch.bincount(token, minlength=3) / 20_000
    # Three standard errors of a share over 20,000 draws are at most 0.0104.
    assert (found - chances).abs().max() < 0.0104


def test_filters_by_hand() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = filtered(logits, 2, None).isfinite()[0].tolist()
    assert kept == [True, True, False, False]
    # Before the third token 0.7 of the mass is gone, before the second 0.4.
    assert filtered(logits, None, 0.7001).isfinite()[0].tolist() == [True, True, True, False]
    assert filtered(logits, None, 0.6999).isfinite()[0].tolist() == [True, True, False, False]
    assert filtered(logits, None, 0.01).isfinite()[0].tolist() == [True, False, False, False]
    assert filtered(logits, None, 1.0) is logits
    # 0.1 is a quarter of 0.4, and 0.2 is half of it.
    assert filtered(logits, None, None, 0.2499).isfinite()[0].tolist() == [True, True, True, True]
    assert filtered(logits, None, None, 0.2501).isfinite()[0].tolist() == [True, True, True, False]
    assert filtered(logits, None, None, 0.5001).isfinite()[0].tolist() == [True, True, False, False]
    assert filtered(logits, None, None, 1.0).isfinite()[0].tolist() == [True, False, False, False]
    assert filtered(logits, 3, None, 0.5001).isfinite()[0].tolist() == [True, True, False, False]
    shuffled = logits[:, [2, 0, 3, 1]]
    assert filtered(shuffled, None, 0.6999).isfinite()[0].tolist() == [False, True, False, True]


def test_padding_by_hand() -> None:
    batch = PromptBatch([[5, 6, 7], [8]], 0, torch.device("cpu"), torch.float32)
    assert batch.ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.positions().tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.inputs() == {}
    assert batch.shift is None


def test_the_likeliest_tokens_are_those_of_generate(language: LanguageModel) -> None:
    prompts = [language.encode(text) for text in PROMPTS]
    mine = sample_completions(language, prompts, range(4), [0] * 4, max_tokens=7, temperature=0.0)
    for prompt, found, ended in zip(prompts, mine.ids, mine.ended):
        whole = language.model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[0, len(prompt) :]
        assert found == whole.tolist()
        assert ended == (found[-1] in language.ends)


def test_a_completion_depends_on_its_key_alone(language: LanguageModel) -> None:
    prompts = [language.encode(text) for text in PROMPTS]
    keys = completion_keys([11, 12, 13, 14], 3)
    owner = [p for p in range(4) for _ in range(3)]
    together = sample_completions(language, prompts, owner, keys, max_tokens=8)
    assert len({tuple(ids) for ids in together.ids}) > 6
    for k, p in enumerate(owner):
        alone = sample_completions(language, [prompts[p]], [0], [keys[k]], max_tokens=8)
        assert alone.ids[0] == together.ids[k]
        assert alone.ended[0] == together.ended[k]
        assert alone.log_probs[0] == pytest.approx(together.log_probs[k], abs=1e-4)


def test_completions_with_the_same_beginning_share_their_pass_over_it(language: LanguageModel) -> None:
    prompts, owner = [language.encode(text) for text in PROMPTS[:2]], [0] * 12 + [1] * 12
    seen: list[int] = []
    handle = language.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(len(args[0]))
    )
    sampled = sample_completions(language, prompts, owner, range(24), max_tokens=6, temperature=0.5)
    handle.remove()
    beginnings = [
        {(p, *ids[:t]) for p, ids in zip(owner, sampled.ids) if len(ids) > t} for t in range(max(map(len, sampled.ids)))
    ]
    assert seen == [len(one) for one in beginnings]
    assert len(beginnings[1]) < 24


def test_completions_end_once_or_at_the_longest_length(language: LanguageModel) -> None:
    prompt = language.encode("1+2=")
    found = sample_completions(language, [prompt], [0] * 64, completion_keys([3], 64), max_tokens=5)
    assert 0 < sum(found.ended) < 64
    for ids, chances, ended in zip(found.ids, found.log_probs, found.ended):
        assert len(ids) == len(chances) <= 5
        assert ended == (ids[-1] in language.ends)
        assert not set(ids[:-1]) & set(language.ends)
        assert ended or len(ids) == 5


@pytest.mark.parametrize("stop", [["5"], ["12", "-"], ["3=", "7", "="]])
def test_a_completion_ends_where_a_text_ends_it_and_not_before(language: LanguageModel, stop: list[str]) -> None:
    prompts, keys = [language.encode("1+2="), language.encode("5=5=")], completion_keys([3, 4], 64)
    owner = [0] * 64 + [1] * 64
    whole = sample_completions(language, prompts, owner, keys, max_tokens=8)
    found = sample_completions(language, prompts, owner, keys, max_tokens=8, stop=stop)
    ended_by_text = 0
    for ids, own, chances, before, ended in zip(whole.ids, found.ids, found.log_probs, whole.ended, found.ended):
        texts = [language.decode(ids[: k + 1]) for k in range(len(ids))]
        last = next((k for k, text in enumerate(texts) if any(word in text for word in stop)), None)
        assert own == (ids if last is None else ids[: last + 1])
        assert len(chances) == len(own)
        assert ended == (before or last is not None)
        ended_by_text += last is not None and last + 1 < len(ids)
    assert 5 < ended_by_text < 128


def test_a_stop_text_that_the_model_cannot_write_is_named(language: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"generation.stop is '</answer>', and the model has no tokens that write it"):
        stopping(language.tokenizer, ["</answer>"])


def test_a_tokenizer_that_cannot_tell_texts_is_named() -> None:
    words = Tokenizer(WordLevel({"1": 0, "<end>": 1}, unk_token="<end>"))
    with pytest.raises(ValueError, match=r"generation.stop: .* does not tell the texts of its tokens .*; leave"):
        stopping(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"), ["1"])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_the_samplers_log_probs_are_those_of_scoring(language: LanguageModel, temperature: float) -> None:
    prompts = [language.encode(text) for text in PROMPTS]
    owner = [0, 0, 1, 2, 3, 3]
    found = sample_completions(language, prompts, owner, range(6), max_tokens=6, temperature=temperature)
    scored, mask = completion_log_probs(language, prompts, found.ids, owner, temperature=temperature)
    for row, chances in enumerate(found.log_probs):
        assert int(mask[row].sum()) == len(chances)
        assert scored[row, : len(chances)].tolist() == pytest.approx(chances, abs=1e-4)


def test_first_tokens_are_drawn_from_the_model(language: LanguageModel) -> None:
    prompt = language.encode("47-85=")
    with torch.no_grad():
        wanted = language.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    found = sample_completions(language, [prompt], [0] * 4000, completion_keys([1], 4000), max_tokens=1)
    share = torch.bincount(torch.tensor([ids[0] for ids in found.ids]), minlength=len(wanted)) / 4000
    error = (wanted * (1 - wanted) / 4000).sqrt()
    assert ((share - wanted).abs() <= 4 * error + 1e-9).all()


def test_keys_of_completions_differ() -> None:
    keys = completion_keys([1, 2], 4)
    assert len(set(keys)) == 8
    assert completion_keys([2], 2) == keys[4:6]
    assert all(0 <= key < 2**63 for key in keys)
    assert math.log2(max(keys)) > 40


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_are_refused(language: LanguageModel, temperature: float) -> None:
    """Every draw from them would be the last token, or the first one."""
    with torch.no_grad():
        next(iter(language.model.parameters()))[4, 0] = torch.nan  # the embedding of one token, in the second prompt
    prompts = [[5, 6], [5, 4]]
    keys = completion_keys([1, 2], 1)
    with pytest.raises(FloatingPointError, match="the model's logits are no numbers"):
        sample_completions(language, prompts, [0, 1], keys, max_tokens=2, temperature=temperature)
