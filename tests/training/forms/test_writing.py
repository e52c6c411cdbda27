"""Forms of a rollout of text: what they write, what is trained of it, and that a run with one resumes to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.training.text.forms import plain
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.text.writing import Attempt, Writer
from tests.parts.own_parts import TEXT, same_when_resumed, write_part
from tests.training.test_text import gradient, task_of
from tests.training.text_runs import trainer_of

MINE = '''
"""Half of a group sees a hint, and every completion is told to go on after its third token."""
from dataclasses import replace
from flowgrpo.parts.ranges import Count


def hinted(writer, *, after: Count = 3):
    hint = writer.ids("1+1=")
    first = writer.write(writer.starts(), limit=after)
    score = writer.score(first)
    told = [
        replace(one.followed(hint), ended=False, origin={"score": float(value)})
        for one, value in zip(first, score)
    ]
    done = writer.write(told, stage=1, limit=12)
    return [replace(one, counts=k % 4 != 3) for k, one in enumerate(done)]
'''


def writer_of(small: list[str], folder: Path, *more: str, score: bool = True) -> Writer:
    trainer = trainer_of(small, folder, *more)
    rows = trainer.collector.rows(0)
    keys = [trainer.collector._key(0, p, 0) for p in range(len(rows))]
    policy = task_of(trainer).policy
    return Writer(
        policy, rows, keys, trainer.recipe.rollout.group, iteration=0, temperature=1.0, batch=5,
        score=trainer._judged if score else None,
    )  # fmt: skip


def test_plain_writes_what_a_run_samples(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run")
    _, usual = trainer.collect(0)
    writer = writer_of(small_text, tmp_path / "other")
    mine = writer.completions(plain(writer))
    assert mine.sampled.ids == usual.sampled.ids
    assert mine.sampled.ended == usual.sampled.ended
    assert mine.samples == usual.samples
    assert mine.prompt_of_sample == usual.prompt_of_sample
    for own, other in zip(mine.sampled.log_probs, usual.sampled.log_probs):
        assert own == pytest.approx(other, abs=1e-5)


def test_a_cut_completion_goes_on_within_its_limit(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    whole = writer.write(writer.starts())
    begun = [one.cut(2) for one in whole]
    assert all(len(one.ids) == min(2, len(full.ids)) for one, full in zip(begun, whole))
    limits = [3 + k % 2 for k in range(len(begun))]
    done = writer.write(begun, stage=1, limit=limits)
    for one, before, full, limit in zip(done, begun, whole, limits):
        assert one.ids[: len(before.ids)] == before.ids
        assert len(one.ids) <= max(limit, len(before.ids))
        assert all(one.own)
        if before is full:
            assert one is full  # it had ended, so nothing is after it
    assert any(len(one.ids) == 3 and not one.ended for one in done)


def test_an_attempt_does_not_depend_on_the_others(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    together = writer.write(writer.starts(), stage=4)
    alone = writer.write([one for one in writer.starts() if one.prompt == 1], stage=4)
    assert [one.ids for one in together if one.prompt == 1] == [one.ids for one in alone]


def test_the_log_probs_of_a_continuation_are_those_of_the_context(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    hint = writer.ids("2+3=5 ")
    starts = [replace(one, context=one.context + hint) for one in writer.starts()]
    found = writer.write(starts)
    for one, values in zip(found, writer.log_probs(found)):
        assert values.tolist() == pytest.approx(one.log_probs, abs=1e-4)


def test_only_own_tokens_are_trained(small_text: list[str], tmp_path: Path) -> None:
    """A batch's gradient equals the plain computation with the words of the form masked."""
    trainer = trainer_of(small_text, tmp_path / "run", "rollout.tokens=200")
    writer = writer_of(small_text, tmp_path / "other")
    writer.policy = task_of(trainer).policy
    told = [one.cut(2).followed(writer.ids("1+")) for one in writer.write(writer.starts(), limit=3)]
    done = [replace(one, counts=k % 3 > 0) for k, one in enumerate(writer.write(told, stage=1, limit=8))]
    e = writer.completions(done)
    advantages = torch.linspace(-1, 1, len(done))
    mine = gradient(trainer, e, advantages)
    log_probs, mask = writer.policy.log_probs(e, range(len(done)))
    width = mask.shape[1]
    own = torch.tensor([[*one.own, *[False] * (width - len(one.own))] for one in done])
    counted = own & torch.tensor([one.counts for one in done])[:, None]
    policy_loss(log_probs, log_probs.detach(), advantages, counted, denom=int(counted.sum()))[0].backward()
    for name, parameter in trainer.task.weights.named_parameters().items():
        if parameter.grad is not None:
            assert torch.allclose(mine[name], parameter.grad, atol=1e-6), name


def test_what_cannot_be_trained_is_refused(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run", score=False)
    with pytest.raises(ValueError, match="without tokens for prompt 0"):
        writer.completions([Attempt(0, [1])])
    done = writer.write(writer.starts())
    with pytest.raises(ValueError, match="no attempt that counts for prompt 2"):
        writer.completions([replace(one, counts=one.prompt != 2) for one in done])
    with pytest.raises(ValueError, match="cannot be used in evaluations"):
        writer.score(done)


@pytest.mark.slow
def test_a_form_of_ones_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_part(tmp_path, MINE)
    recipe = same_when_resumed("text", [*TEXT, "rollout.form={name: mine.py:hinted, after: 2}"], tmp_path)
    assert recipe.rollout.form["after"] == 2


def test_an_engine_that_only_completes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_part(tmp_path, MINE)
    with pytest.raises(ValueError, match=r"use generation\.engine transformers"):
        load_recipe("text", ["rollout.form=mine.py:hinted", "generation.engine=vllm"])


def test_a_text_that_ends_completions_may_span_a_cut(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run", "generation.stop=['12']")
    begun = [replace(one, ids=writer.ids("31"), log_probs=[0.0] * 2, own=[True] * 2) for one in writer.starts(count=99)]
    done = writer.write(begun, stage=1, temperature=3.0)
    ended = [one for one in done if one.ids[:3] == writer.ids("312")]
    assert ended
    for one in ended:
        assert len(one.ids) == len(one.log_probs) == len(one.own) == 3
        assert one.ended


@pytest.mark.parametrize(
    ("form", "tokens"), [("{name: elastic, thinking: 30, answer: 30}", 60), ("{name: exits, answer: 60}", 60)]
)
def test_a_form_keeps_to_the_positions_of_the_model(
    small_text: list[str], tmp_path: Path, form: str, tokens: int
) -> None:
    writer = writer_of(small_text, tmp_path / "run", f"rollout.form={form}")
    vars(writer.policy.language)["positions"] = 20
    begun = writer.starts(count=1)
    given = len(begun[0].context)
    with pytest.raises(
        ValueError, match=rf"wants {tokens} tokens after {given} tokens .* positions for 21 tokens in all"
    ):
        writer.write(begun, limit=tokens)
    longer = replace(begun[0], context=[5] * 20).followed([4, 4])
    with pytest.raises(ValueError, match="wants 0 tokens after 22 tokens"):
        writer.log_probs([longer])


def test_a_form_that_asks_rewards_of_parts_gets_them(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run", "parts={cut: pattern, pattern: '[0-4]'}")
    seen = []

    def score(rows: object, found: Completions) -> torch.Tensor:
        seen.append(found.parts)
        return torch.zeros(len(found.samples))

    writer._score = score  # type: ignore[assignment]
    writer.score(writer.write(writer.starts()))
    assert seen[0] is not None
    assert len(seen[0].texts) == 12


def test_what_is_no_list_of_attempts_is_named(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    done = writer.write(writer.starts())
    for wrong, message in (
        (None, "returned None; return a list of attempts"),
        (["a"], r"returned \['a'\]; return a list of attempts"),
        ([replace(done[0], prompt=7)], "made an attempt for prompt 7; there are 3"),
        ([replace(one, own=one.own[:-1]) for one in done], "ids, .* log_probs and .* own; give each token all three"),
        ([replace(one, own=[False] * len(one.ids)) for one in done], "no token that the policy drew"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.completions(wrong)  # type: ignore[arg-type]
