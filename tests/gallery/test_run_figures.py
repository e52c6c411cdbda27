"""Figures made at build time, against values worked out by hand."""

from pathlib import Path

import pytest

from flowgrpo.gallery.export_rows import choose, rows_of
from flowgrpo.gallery.run_figures import diversity_of_colours, diversity_of_texts, group_spreads, summarize
from flowgrpo.gallery.run_reading import read_run
from flowgrpo.gallery.thumbnails import Thumbnail
from tests.gallery.folders import record, write_run, written


def test_summary_has_errors_over_prompts_and_leaves_out_missing_rewards(tmp_path: Path) -> None:
    # Gains: prompt 1: 0.6 and 0.2; prompt 2: -0.2; prompt 3: 0; prompt 4: not applicable at 10. Their mean is 0.15.
    ends = [(1, 7, 0.0, 0.6), (1, 8, 0.5, 0.7), (2, 7, 0.9, 0.7), (3, 7, 0.2, 0.2), (4, 7, 1.0, float("nan"))]
    records = [
        record(iteration, prompt_id, seed, value)
        for prompt_id, seed, base, tuned in ends
        for iteration, value in ((0, base), (4, 5.0), (10, tuned))
    ]
    records.append(record(10, 1, 7, 99.0, phase="train"))
    metrics = [{"iteration": 0, "eval/gold": 0.4}, {"iteration": 10, "eval/gold": 0.5}]
    found = summarize(read_run(write_run(tmp_path / "run", records, metrics)), "gold")
    assert found is not None
    # In sum, the prompts lie 0.5, -0.35 and -0.15 from it.
    error = ((0.5**2 + 0.35**2 + 0.15**2) * 3 / 2) ** 0.5 / 4
    assert found["before"] == pytest.approx(1.6 / 4)
    assert found["after"] == pytest.approx(2.2 / 4)
    assert found["error"] == pytest.approx(error)
    assert [found[key] for key in ("prompts", "pairs", "gained", "lost")] == [3, 4, 2, 1]
    assert found["whole"] == [0.4, 0.5]


def test_summary_of_two_seeds_each_is_paired_by_prompt(tmp_path: Path) -> None:
    """Mean gains of 0.1, 0.2 and 0.6 by prompt: the deviation √0.07 over √3, whatever the seeds differ by."""
    ends = [(1, 7, 0.0), (1, 8, 0.2), (2, 7, 0.1), (2, 8, 0.3), (3, 7, 0.5), (3, 8, 0.7)]
    records = [record(k, prompt, seed, k / 10 * gain) for prompt, seed, gain in ends for k in (0, 10)]
    found = summarize(read_run(write_run(tmp_path / "run", records)), "gold")
    assert found is not None
    assert found["error"] == pytest.approx((0.07 / 3) ** 0.5)


def test_summary_compares_evaluations_of_the_same_settings(tmp_path: Path) -> None:
    records = [record(k, prompt, 7, value) for prompt in (1, 2) for k, value in ((0, 0.1), (4, 0.5), (10, 0.6))]
    run = write_run(tmp_path / "run", records)
    for start, steps in ((0, 4), (4, 12)):
        folder = run / "recipes" / f"iter-{start:06d}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"evaluate: {{steps: {steps}, every: {2 + start}}}")
    found = summarize(read_run(run), "gold")
    assert found is not None
    assert (found["before"], found["after"]) == (0.5, 0.6)
    folder.rename(folder.with_name("iter-000010"))
    assert summarize(read_run(run), "gold") is None
    (folder.with_name("iter-000010") / "config.yaml").write_text("{")
    found = summarize(read_run(run), "gold")
    assert found is not None
    assert found["before"] == 0.1


def test_diversity_is_the_standard_deviation_of_the_colours() -> None:
    assert diversity_of_colours([b"\x10\x20", b"\x10\x20", b"\x10\x20"]) == 0
    # Two images that differ by 51 (a fifth of the range) in one of two values: variance 51²/2, mean of two 51²/4.
    assert diversity_of_colours([b"\x00\x07", b"\x33\x07"]) == pytest.approx(0.2 / 2)
    assert diversity_of_colours([b"\x00", b"\xff"]) == pytest.approx(0.5**0.5)


def test_diversity_of_texts_counts_distinct_ones() -> None:
    assert diversity_of_texts(["a", "a", "a"]) == 0
    assert diversity_of_texts(["a", "b", "c"]) == 1
    assert diversity_of_texts(["a", "b", "a"]) == 0.5


def test_groups_are_the_samples_of_a_prompt_in_one_phase_and_iteration(tmp_path: Path) -> None:
    records = [record(0, 1, seed, value, phase="train") for seed, value in enumerate([0.0, 1.0, 0.5])]
    records += [record(0, 2, seed, 0.3, phase="train") for seed in range(2)]
    records += [record(0, 3, 0, 0.3, phase="train"), record(0, 1, 0, 0.7), record(5, 1, 0, 0.7)]
    run = read_run(write_run(tmp_path / "run", records))
    thumbnails: dict[str, Thumbnail | None] = {
        record(0, 2, seed, 0)["image"]: Thumbnail(str(seed), 1, 1, bytes([51 * seed])) for seed in range(2)
    }
    (found,) = group_spreads(run.pairs, ["gold", "other"], thumbnails)
    assert (found["phase"], found["iteration"], found["groups"]) == ("train", 0, 2)
    assert found["spread"] == [pytest.approx((0.5 + 0.0) / 2), None]
    assert found["looks"] == pytest.approx(0.2 / 2**0.5)  # of the one group whose images are known


def test_groups_of_completions(tmp_path: Path) -> None:
    records = [written(0, 1, text) | {"seed": seed} for seed, text in enumerate(["a", "b", "a"])]
    (found,) = group_spreads(read_run(write_run(tmp_path / "run", records)).pairs, ["gold"], {})
    assert found["looks"] == 0.5


def scored(iteration: int, prompt: int, gold: float, proxy: float) -> dict[str, object]:
    return record(iteration, prompt, 0, gold, rewards={"gold": gold, "proxy": proxy})


def test_orders_of_an_export(tmp_path: Path) -> None:
    # By prompt: (gold, proxy) gains of (-0.1, 0.4), (0.3, 0.5), (-0.4, 0.3), (0.2, -0.3).
    ends = {1: (-0.1, 0.4), 2: (0.3, 0.5), 3: (-0.4, 0.3), 4: (0.2, -0.3)}
    records = [scored(0, prompt, 0.5, 0.5) for prompt in ends]
    records += [scored(10, prompt, 0.5 + gold, 0.5 + proxy) for prompt, (gold, proxy) in ends.items()]
    records += [record(10, 5, 0, 1.0)]  # not evaluated first
    rows = rows_of([read_run(write_run(tmp_path / "run", records))])

    def ids(reward: str | None, order: str, count: int = 9) -> list[int]:
        return [int(row.first.prompt_id) for row in choose(rows, ["gold", "proxy"], reward, order, count)]

    assert ids(None, "file") == [1, 2, 3, 4]
    assert ids("proxy", "gained") == [2, 1, 3, 4]
    assert ids("gold", "lost", 2) == [3, 1]
    assert ids("gold", "high", 1) == [2]
    assert ids("gold", "low", 1) == [3]
    # Sizes: gold √(0.30/4) = 0.274, proxy √(0.59/4) = 0.384.
    # Prompt 3: 0.3/0.384 + 0.4/0.274 = 2.24; prompt 1: 0.4/0.384 + 0.1/0.274 = 1.41.
    assert ids("proxy", "cheating") == [3, 1]
    assert ids("gold", "cheating") == [4]
    with pytest.raises(ValueError, match=r"no reward 'beauty'.*gold, proxy"):
        ids("beauty", "gained")
    with pytest.raises(ValueError, match=r"no order 'best'.*cheating"):
        ids("gold", "best")


def test_no_cheats_is_said(tmp_path: Path) -> None:
    records = [scored(iteration, 1, iteration / 10, 0.5) for iteration in (0, 10)]
    rows = rows_of([read_run(write_run(tmp_path / "run", records))])
    with pytest.raises(ValueError, match=r"no pair of samples.*'cheating'"):
        choose(rows, ["gold", "proxy"], "gold", "cheating", 3)


def test_why_there_is_no_pair_is_said(tmp_path: Path) -> None:
    changed = [{**scored(at, 1, 0.5, 0.5), "rewards": {name: 0.5}} for at, name in ((0, "gold"), (10, "proxy"))]
    rows = rows_of([read_run(write_run(tmp_path / "rewards", changed))])
    with pytest.raises(ValueError, match=r"'gold' at the start and at the end; give another reward"):
        choose(rows, ["gold", "proxy"], "gold", "gained", 3)
    others = [record(0, 1, 0, 0.5), record(10, 2, 0, 0.5)]
    rows = rows_of([read_run(write_run(tmp_path / "prompts", others))])
    with pytest.raises(ValueError, match="no prompt with the same seed in common"):
        choose(rows, [], "gold", "gained", 3)


def test_rows_of_several_runs_meet_by_prompt_and_seed(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [record(at, prompt, 0, at + prompt) for at in (0, 5) for prompt in (1, 2)])
    # The other prompt file numbers the same prompts otherwise, and lacks one.
    other = write_run(tmp_path / "b", [record(at, 9, 0, at, prompt="prompt 2") for at in (0, 7)])
    (row,) = rows_of([read_run(first), read_run(other)])
    assert [shot and (shot.iteration, shot.rewards["gold"]) for shot in row.shots] == [(0, 2.0), (5, 7.0), (7, 7.0)]
