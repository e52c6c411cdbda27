"""The memory of prompts: by hand, and through a checkpoint."""

import io
import math

import pytest
import torch

from flowgrpo.core.prompt_memory import Successes, VarianceCurriculum, answer_diversity

NAN = math.nan


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_score_is_the_variance_of_the_rewards():
    known = VarianceCurriculum()
    known.observe("a", [1, 0, 0, 0])
    known.observe("b", [0.2, 0.8, NAN])
    known.observe("c", [0.1] * 3)
    assert known.rate("a") == 0.25
    assert known.rate("b") == pytest.approx(0.5)
    assert known.state_dict()["sums"]["a"] == [4, 1, 1, 0]
    assert known.score("a") == pytest.approx(0.25 * 0.75)
    assert known.score("b") == pytest.approx(0.09)
    assert known.score("c") == 0.0
    assert known.rate("d") is known.score("d") is None
    known.observe("close", [1, 1.001] * 500)
    assert known.score("close") == pytest.approx(2.5e-7, rel=1e-3)


def test_the_past_fades():
    known = VarianceCurriculum(decay=0.5)
    known.observe("a", [1, 1, 1, 1])
    known.observe("a", [0, 0])
    assert known.rate("a") == pytest.approx(2 / 4)  # four successes count as two
    assert known.score("a") == pytest.approx(0.25)
    known.observe("a", [])
    known.observe("a", [NAN])
    assert known.rate("a") == pytest.approx(0.5)
    forgetful = VarianceCurriculum(decay=0.0)
    forgetful.observe("a", [1, 1])
    forgetful.observe("a", [0, 1])
    assert forgetful.rate("a") == 0.5


def test_answers_are_various_where_no_two_are_equal():
    assert answer_diversity(["1", "2", "3"]) == 1
    assert answer_diversity(["1", "2"]) == 1
    assert answer_diversity(["1", "1", "1"]) == 0
    assert answer_diversity(iter(["1", "2", None, "1", "2", None, "3"])) == 0.5
    assert answer_diversity(["1", None]) == answer_diversity([None, None]) == answer_diversity([]) == 0


def test_diversity_adds_to_the_variance():
    known = VarianceCurriculum(decay=1.0)
    known.observe("a", [1, 0], diversity=0.3)
    known.observe("a", [1, 0], diversity=0.1)
    assert known.score("a") == pytest.approx(0.25 + 0.2)


def test_probabilities_by_hand():
    known = VarianceCurriculum(mix=0.4)
    known.observe("even", [1, 0])
    known.observe("rare", [1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    known.observe("solved", [1, 1])
    total = 0.25 + 0.09
    got = known.probabilities(["even", "rare", "solved"])
    assert got == pytest.approx([0.4 / 3 + 0.6 * 0.25 / total, 0.4 / 3 + 0.6 * 0.09 / total, 0.4 / 3])
    # A new prompt counts as the best known prompt.
    got = known.probabilities(["new", "rare", "solved"])
    assert got == pytest.approx([0.4 / 3 + 0.3, 0.4 / 3 + 0.3, 0.4 / 3])
    assert known.probabilities(["even", "new"]) == pytest.approx([0.5, 0.5])


def test_without_any_variance_all_are_drawn_alike():
    known = VarianceCurriculum(mix=0.0)
    assert known.probabilities(["a", "b"]) == [0.5, 0.5]
    known.observe("a", [1, 1])
    assert known.probabilities(["a", "b"]) == [0.5, 0.5]
    known.observe("b", [0, 1])
    assert known.probabilities(["a", "b"]) == [0.0, 1.0]


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_probabilities_add_up_and_follow_the_prompts(mix):
    known = VarianceCurriculum(mix=mix)
    for i in range(6):
        known.observe(i, [1.0] * i + [0.0] * (7 - i))
    got = known.probabilities(list(range(8)))
    assert sum(got) == pytest.approx(1.0)
    assert known.probabilities([5, 0, 3, 7, 1, 2, 4, 6]) == pytest.approx([got[i] for i in (5, 0, 3, 7, 1, 2, 4, 6)])
    assert min(got) >= mix / 8 - 1e-12


def test_a_curriculum_goes_on_where_it_was():
    first, second = VarianceCurriculum(), VarianceCurriculum()
    first.observe("a", [1, 0, 0])
    first.observe(7, [0.5, 0.1])
    second.load_state_dict(through_a_file(first.state_dict()))
    for known in (first, second):
        known.observe("a", [1, 1])
    assert first.probabilities(["a", 7]) == second.probabilities(["a", 7])
    assert second.rate("a") == pytest.approx((0.9 + 2) / (2.7 + 2))


def test_the_latest_successes_are_kept():
    store = Successes(keep=2)
    for item in ("old", "newer", "newest"):
        store.add("a", item)
    assert store.of("a") == ["newest", "newer"]
    assert store.of("b") == []
    for keep, store in ((4, Successes()), (1, Successes(keep=1))):
        for item in range(9):
            store.add("a", item)
        assert store.of("a") == [8, 7, 6, 5][:keep]


def test_a_group_of_failures_is_repaired_at_its_worst_row():
    store = Successes()
    for prompt in ("hard", "mixed", "broken"):
        store.add(prompt, f"a way to do the {prompt}")
    store.add("hard", "another way")
    store.add("hard", "a newer way")
    rewards = [0.2, 0.1, 0.1, 1.0, 0.0, 0.0, NAN, 0.3]
    prompts = ["hard", "hard", "hard", "mixed", "mixed", "unknown", "broken", "hard"]
    assert store.repairs(rewards, prompts) == [(1, "a newer way")]
    assert store.repairs(rewards, prompts, success=0.3) == []
    assert store.repairs([0.5, 0.4], ["hard", "hard"]) == []
    assert store.repairs([0.49, 0.4], ["hard", "hard"]) == [(1, "a newer way")]


def test_a_store_goes_on_where_it_was():
    first, second = Successes(keep=2), Successes(keep=2)
    first.add("a", {"tokens": torch.tensor([1, 2]), "logp": [0.5]})
    first.add("a", "x")
    second.load_state_dict(through_a_file(first.state_dict()))
    second.add("a", "y")
    assert second.of("a") == ["y", "x"]
    assert torch.equal(first.of("a")[1]["tokens"], torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: VarianceCurriculum(decay=1.5), "`decay` is 1.5"),
        (lambda: VarianceCurriculum(mix=-0.1), "`mix` is -0.1"),
        (lambda: VarianceCurriculum().probabilities([]), "`prompts` is empty"),
        (lambda: Successes(0), "`keep` is 0"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
