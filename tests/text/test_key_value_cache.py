"""The cache of keys and values under the names of several versions of transformers."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.text.key_value_cache import cache_argument, cache_of, select_rows
from flowgrpo.text.model import LanguageModel
from flowgrpo.text.sampling import completion_keys, sample_completions
from flowgrpo.text.scoring import completion_log_probs


def test_both_names_by_hand() -> None:
    new = SimpleNamespace(forward=lambda input_ids, cache=None, past_key_values=None: None)
    old = SimpleNamespace(forward=lambda input_ids, past_key_values=None: None)
    assert (cache_argument(new), cache_argument(old)) == ("cache", "past_key_values")
    assert cache_of(SimpleNamespace(cache=1)) == cache_of(SimpleNamespace(past_key_values=1)) == 1
    assert cache_of(SimpleNamespace(cache=None, past_key_values=1)) == 1
    for empty in (SimpleNamespace(cache=None, past_key_values=None), SimpleNamespace()):
        with pytest.raises(ValueError, match="the model gives no cache of keys and values or of states"):
            cache_of(empty)


def test_no_call_of_a_model_is_deprecated(language: LanguageModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        prompts = [language.encode(text) for text in ("1+2=", "47-85=")]
        owner = [0, 0, 1, 1]
        found = sample_completions(language, prompts, owner, completion_keys([1, 2], 2), max_tokens=4)
        completion_log_probs(language, prompts, found.ids, owner, shared_prefix=True)


def test_a_cache_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the model keeps its past in object, whose rows cannot all be chosen"):
        select_rows(object(), torch.tensor([0]))


def test_a_cache_that_keeps_states_itself_is_refused() -> None:
    """As versions of transformers had it that give each kind of hybrid a cache of its own."""
    own = SimpleNamespace(conv_states=[], ssm_states=[], reorder_cache=lambda rows: None)
    with pytest.raises(
        ValueError, match="the model keeps its past in SimpleNamespace, whose rows cannot all be chosen"
    ):
        select_rows(own, torch.tensor([0]))
