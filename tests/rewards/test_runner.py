"""Scoring with several rewards: conventions, batching, groups, failures."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.rewards import Reward, RewardError, RewardSet, RewardSpec, Scores

PROMPTS = ["a", "b", "c", "d", "e", "f"]
LEVELS = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
IMAGES = LEVELS.view(6, 1, 1, 1).expand(6, 3, 4, 8).contiguous()


class Spy:
    """Mean brightness that records the sizes of its calls."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.__dict__.update(attributes)

    def __call__(self, images: torch.Tensor, prompts: list[str], **columns: Any) -> torch.Tensor:
        self.calls.append({"prompts": prompts, **columns})
        return images.flatten(1).mean(1)


def rewards(*functions: Callable[..., Any], **options: Any) -> RewardSet:
    return RewardSet([Reward(f, f"r{k}", weight=k + 1.0) for k, f in enumerate(functions)], **options)


def score_one(function: Callable[..., Any]) -> list[float]:
    return rewards(function).score(IMAGES[:3], PROMPTS[:3]).values[:, 0].tolist()


def test_images_are_contiguous_whatever_the_decoder_left() -> None:
    """Decoders may put channels last. A reward may take a view, and a mean rounds by the order of the numbers."""
    strides: list[tuple[int, ...]] = []

    def spread(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        strides.append(images.stride())
        return images.view(len(images), -1).std(1)

    rewards(spread).score(IMAGES[:3].to(memory_format=torch.channels_last), PROMPTS[:3])
    rewards(spread).score(IMAGES.to(memory_format=torch.channels_last)[[0, 2, 4]], PROMPTS[:3])
    assert set(strides) == {(96, 32, 8, 1)}


def test_a_reward_that_changes_its_columns_changes_them_for_itself_alone() -> None:
    columns: dict[str, Any] = {"solution": [["a"], ["b"], ["c"]], "wanted": [{"k": 1}] * 3}

    def greedy(images: torch.Tensor, prompts: list[str], *, solution: Any, wanted: Any) -> list[float]:
        for row, entry in zip(solution, wanted):
            row.append("more")
            entry["k"] += 1
        return [float(len(row) + entry["k"]) for row, entry in zip(solution, wanted)]

    for _ in range(2):
        found = rewards(greedy, greedy).score(IMAGES[:3], PROMPTS[:3], columns)
        assert found.values.tolist() == [[4.0, 4.0]] * 3
    assert columns == {"solution": [["a"], ["b"], ["c"]], "wanted": [{"k": 1}] * 3}


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_every_return_type_becomes_float32(kind: Callable[[list[float]], Any]) -> None:
    result = rewards(lambda images, prompts: kind([1.0, 0.5, 2.0])).score(IMAGES[:3], PROMPTS[:3])
    assert result.values.dtype == torch.float32
    assert result.values.tolist() == [[1.0], [0.5], [2.0]]


def test_mixed_scalars_none_and_nan() -> None:
    values = [None, torch.tensor(2), np.float64("nan")]
    first, second, third = score_one(lambda prompts: values)
    assert math.isnan(first)
    assert second == 2.0
    assert math.isnan(third)
    assert score_one(lambda prompts: torch.tensor([1, 0, 1], dtype=torch.bool)) == [1.0, 0.0, 1.0]
    assert score_one(lambda prompts: torch.ones(3, dtype=torch.bfloat16, requires_grad=True)) == [1.0] * 3


@pytest.mark.parametrize(
    ("result", "message", "index"),
    [
        ([1.0, 2.0], r"returned 2 values for 3 samples", None),
        ((torch.zeros(3), {}), r"returned a tuple \(Tensor, dict\) for 3 samples; return the scores alone", None),
        (([1.0, 2.0, 3.0], [], {}), r"a tuple \(list, list, dict\) for 3 samples", None),
        ((1.0, 2.0), "returned 2 values for 3 samples", None),
        (torch.zeros(3, 1), r"shape \[3, 1\]", None),
        (0.5, "returned a float", None),
        ("abc", "returned a str", None),
        ([1.0, "good", 2.0], r"'good' \(str\)", 1),
        ([1.0, 2.0, -math.inf], "infinite", 2),
        ([1e39, 2.0, 0.0], "infinite", 0),
        ([1j, 2.0, 0.0], "complex", 0),
        (Scores([1.0] * 3, {"part": [1.0]}), r"sub-score 'part'.*1 values", None),
        (Scores([1.0] * 3, notes=["only one"]), "1 notes for 3", None),
        (Scores([1.0] * 3, notes="abc"), "notes for 3", None),
    ],
)
def test_unusable_returns_stop_with_the_rewards_name(result: Any, message: str, index: int | None) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        score_one(lambda prompts: result)
    assert caught.value.reward == "r0"
    assert caught.value.index == index
    assert "'r0'" in str(caught.value)


def test_columns_arrive_by_name_and_only_those_taken() -> None:
    seen: dict[str, Any] = {}

    def picky(images: torch.Tensor, target: list[int]) -> list[int]:
        seen["picky"] = target
        return target

    def greedy(prompts: list[str], **columns: Any) -> list[float]:
        seen["greedy"] = columns
        return [0.0] * len(prompts)

    columns: dict[str, list[Any]] = {"target": [1, 2, 3], "skill": ["x", "y", "z"]}
    rewards(picky, greedy).score(IMAGES[:3], PROMPTS[:3], columns, groups=[0, 0, 1])
    assert seen["picky"] == [1, 2, 3]
    assert set(seen["greedy"]) == {"images", "target", "skill"}


def test_modules_are_called_by_their_forward_signature() -> None:
    class Head(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1).sum(1)

    values = rewards(Head()).score(IMAGES, PROMPTS, {"skill": PROMPTS}).values[:, 0]
    torch.testing.assert_close(values, LEVELS * 3 * 4 * 8)


def test_what_a_reward_lacks_is_said_before_any_reward_runs() -> None:
    def positional(images: torch.Tensor, /) -> list[float]:
        return [0.0] * len(images)

    spy = Spy()
    with pytest.raises(ValueError, match=r"takes `targt`.*did you mean 'target'"):
        rewards(spy, lambda images, targt: targt).score(IMAGES, PROMPTS, {"target": [1] * 6})
    with pytest.raises(ValueError, match="scores `completions`, but the samples here are images"):
        rewards(spy, lambda completions, prompts: [0.0]).score(IMAGES, PROMPTS)
    with pytest.raises(ValueError, match="scores `images`, but the samples here are completions"):
        rewards(lambda images, prompts: [0.0]).score(["text"], ["a"])
    with pytest.raises(ValueError, match="positional-only"):
        rewards(spy, positional).score(IMAGES, PROMPTS)
    with pytest.raises(ValueError, match="pass `groups`"):
        rewards(spy, Spy(whole_group=True)).score(IMAGES, PROMPTS)
    assert spy.calls == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": IMAGES * 2 - 1}, r"range from -1 to 1"),
        ({"samples": IMAGES * math.nan}, "range from nan"),
        ({"samples": (IMAGES * 255).to(torch.uint8)}, "uint8"),
        ({"samples": IMAGES[:, :1]}, r"\[6, 1, 4, 8\]"),
        ({"samples": "prompt"}, "list of B strings"),
        ({"prompts": PROMPTS[:5]}, "prompts has 5 entries for 6"),
        ({"groups": [0, 1]}, "groups has 2"),
        ({"columns": {"skill": ["x"]}}, "column 'skill' has 1"),
        ({"columns": {"images": PROMPTS}}, "column 'images'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards(Spy()).score(**{"samples": IMAGES, "prompts": PROMPTS, **change})


def test_batch_size_bounds_the_calls_and_not_the_result() -> None:
    small, whole = Spy(batch_size=4), Spy()
    result = rewards(small, whole).score(IMAGES, PROMPTS)
    assert [call["prompts"] for call in small.calls] == [["a", "b", "c", "d"], ["e", "f"]]
    assert [len(call["prompts"]) for call in whole.calls] == [6]
    torch.testing.assert_close(result.values, torch.stack([LEVELS, LEVELS], 1))
    assert result.weights.tolist() == [1.0, 2.0]
    assert set(result.seconds) == {"r0", "r1"}
    with pytest.raises(ValueError, match="batch_size is 0"):
        Reward(Spy(batch_size=0), "x")


def test_whole_groups_stay_together_whatever_their_order() -> None:
    def win_rate(images: torch.Tensor, groups: list[int]) -> list[float]:
        level = images.flatten(1).mean(1)
        ids = torch.tensor(groups)
        assert all((ids == i).sum() == {7: 3, 2: 2, 9: 1}[i] for i in set(groups)), "an incomplete group"
        calls.append(len(groups))
        return [float((level[i] > level[ids == g]).float().mean()) for i, g in enumerate(groups)]

    calls: list[int] = []
    groups = [7, 2, 7, 9, 2, 7]
    for size, sizes in ((None, [6]), (3, [3, 3]), (1, [3, 2, 1])):
        calls.clear()
        win_rate.whole_group, win_rate.batch_size = True, size  # type: ignore[attr-defined]
        values = rewards(win_rate).score(IMAGES, PROMPTS, groups=torch.tensor(groups)).values[:, 0]
        torch.testing.assert_close(values, torch.tensor([0, 0, 1 / 3, 0, 0.5, 2 / 3]))
        assert calls == sizes


def test_a_group_reward_that_takes_no_ids_gets_one_group_a_call() -> None:
    seen: list[list[str]] = []

    def relative(prompts: list[str]) -> list[float]:
        seen.append(prompts)
        return [float(len(prompts))] * len(prompts)

    relative.whole_group = True  # type: ignore[attr-defined]
    values = rewards(relative).score(IMAGES, PROMPTS, groups=[1, 0, 1, 1, 0, 3]).values[:, 0]
    assert seen == [["a", "c", "d"], ["b", "e"], ["f"]]
    assert values.tolist() == [3, 2, 3, 3, 2, 1]


def test_permuting_the_samples_permutes_the_scores() -> None:
    order = [4, 1, 5, 0, 3, 2]
    both = (Spy(batch_size=2), Spy(batch_size=3, whole_group=True))
    groups = [0, 1, 0, 1, 0, 1]
    plain = rewards(*both).score(IMAGES, PROMPTS, groups=groups).values
    mixed = rewards(*both).score(IMAGES[order], [PROMPTS[i] for i in order], groups=[groups[i] for i in order])
    assert torch.equal(mixed.values, plain[order])


def test_sub_scores_and_notes_reach_their_rows() -> None:
    def noted(images: torch.Tensor, prompts: list[str]) -> Scores:
        keys: dict[str, Any] = {"x": [1.0, 1.0]} if "a" in prompts else {"y": [None]}
        return Scores([None if p == "b" else 1 for p in prompts], keys, [f"saw {p}" for p in prompts])

    noted.batch_size = 2  # type: ignore[attr-defined]
    result = rewards(noted, Spy()).score(IMAGES[:3], PROMPTS[:3])
    assert result.notes == {"r0": ["saw a", "saw b", "saw c"]}
    assert result.sub_scores["r0"]["x"][:2] == [1.0, 1.0]
    assert math.isnan(result.sub_scores["r0"]["x"][2])
    record = json.loads(json.dumps(result.record(1), allow_nan=False))
    assert record["rewards"] == {"r0": None, "r1": pytest.approx(0.2)}
    assert record["sub_scores"] == {"r0": {"x": 1.0, "y": None}}
    assert record["notes"] == {"r0": "saw b"}


def test_a_reward_cannot_spoil_the_samples_of_the_next() -> None:
    def censor(images: torch.Tensor, prompts: list[str]) -> list[float]:
        images.zero_()
        prompts.reverse()
        return [0.0] * len(prompts)

    given = IMAGES.clone()
    result = rewards(censor, Spy()).score(given, PROMPTS)
    torch.testing.assert_close(result.values[:, 1], LEVELS)
    assert torch.equal(given, IMAGES)
    assert PROMPTS[0] == "a"


def test_images_come_as_float32_without_gradient_on_the_rewards_device() -> None:
    def check(images: torch.Tensor) -> torch.Tensor:
        assert images.dtype == torch.float32
        assert images.device.type == "meta"
        return torch.zeros(len(images), requires_grad=not torch.is_grad_enabled())

    check.device = "meta"  # type: ignore[attr-defined]
    rewards(check).score(IMAGES.bfloat16().requires_grad_(), PROMPTS)


def test_a_raising_reward_stops_and_its_sample_is_kept(tmp_path: Path) -> None:
    def fragile(images: torch.Tensor, prompts: list[str]) -> list[float]:
        if "e" in prompts:
            raise ZeroDivisionError("no edges")
        return [1.0] * len(prompts)

    kept = tmp_path / "failed"
    for number in range(2):
        with pytest.raises(RewardError, match=r"'r1' failed on sample 4 \(prompt 'e'\).*no edges") as caught:
            rewards(Spy(), fragile, quarantine=kept).score(IMAGES, PROMPTS, {"skill": list("uvwxyz")}, [3] * 6)
        error = caught.value
        assert (error.reward, error.index, error.prompt) == ("r1", 4, "e")
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert error.saved == kept / f"r1-000{number}"
    assert sorted(path.name for path in kept.iterdir()) == ["r1-0000", "r1-0001"]
    facts = json.loads((kept / "r1-0000" / "sample-0004.json").read_text())
    assert facts["prompt"] == "e"
    assert facts["columns"] == {"skill": "y"}
    assert facts["group"] == 3
    with Image.open(kept / "r1-0000" / "sample-0004.png") as picture:
        assert picture.size == (8, 4)
        assert picture.getpixel((0, 0)) == (204, 204, 204)
    assert len(list((kept / "r1-0000").iterdir())) == 2


def test_a_failure_of_the_batch_alone_keeps_the_whole_batch(tmp_path: Path) -> None:
    def hungry(images: torch.Tensor) -> list[float]:
        if len(images) > 2:
            raise MemoryError("too many")
        return [1.0] * len(images)

    hungry.batch_size = 4  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match="batch_size") as caught:
        rewards(hungry, quarantine=tmp_path).score(IMAGES, PROMPTS)
    assert caught.value.index is None
    assert caught.value.indices == [0, 1, 2, 3]
    assert len(list((tmp_path / "r0-0000").glob("*.png"))) == 4


def test_a_reward_of_images_learns_that_it_got_videos() -> None:
    def brightness(images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(1, 2, 3))

    said = r"return \[2\]\. `images` are videos here, of shape \[2, 9, 3, 4, 5\]: samples, frames, channels"
    with pytest.raises(RewardError, match=said):
        rewards(brightness).score(torch.rand(2, 9, 3, 4, 5), ["a", "b"])


def test_a_run_says_how_to_go_on_after_a_failure() -> None:
    def broken(prompts: list[str]) -> list[float]:
        raise ValueError("bad")

    chosen = rewards(broken)
    with pytest.raises(RewardError, match=r"ValueError: bad\.$"):
        chosen.score(IMAGES, PROMPTS)
    chosen.advice = "Go on with `flowgrpo resume r`."
    for one in (chosen, chosen.only(0)):
        with pytest.raises(RewardError, match=r"ValueError: bad\. Go on with `flowgrpo resume r`\.$"):
            one.score(IMAGES, PROMPTS)


def test_videos_and_completions_are_kept_too(tmp_path: Path) -> None:
    def broken(prompts: list[str]) -> list[float]:
        raise ValueError("bad")

    with pytest.raises(RewardError):
        rewards(broken, quarantine=tmp_path).score(torch.rand(1, 3, 3, 4, 4), ["clip"])
    assert len(list((tmp_path / "r0-0000").glob("sample-0000-frame-*.png"))) == 3
    with pytest.raises(RewardError):
        rewards(broken, quarantine=tmp_path).score(["an answer"], ["a question"])
    assert json.loads((tmp_path / "r0-0001" / "sample-0000.json").read_text())["completion"] == "an answer"


def test_a_full_disk_does_not_hide_the_rewards_own_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(RewardError, match=r"returned 0 values.*could not be saved") as caught:
        rewards(lambda prompts: [], quarantine=blocked).score(IMAGES, PROMPTS)
    assert caught.value.saved is None


class Flaky(Spy):
    def __init__(self, failures: int, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.failures = failures

    def __call__(self, images: torch.Tensor, prompts: list[str], **columns: Any) -> torch.Tensor:
        values = super().__call__(images, prompts, **columns)
        if len(self.calls) <= self.failures:
            raise ConnectionError(f"refused {len(self.calls)}")
        return values


def test_a_remote_reward_is_retried_with_growing_pauses() -> None:
    pauses: list[float] = []
    flaky = Flaky(3, remote=True)
    result = rewards(flaky, retries=3, base_delay=0.5, sleep=pauses.append).score(IMAGES, PROMPTS)
    assert pauses == [0.5, 1.0, 2.0]
    torch.testing.assert_close(result.values[:, 0], LEVELS)
    assert all(call["prompts"] == PROMPTS for call in flaky.calls)


def test_a_remote_reward_gives_up_and_a_local_one_never_waits(tmp_path: Path) -> None:
    pauses: list[float] = []
    flaky = Flaky(99, remote=True, batch_size=2)
    options = {"retries": 2, "base_delay": 1.0, "sleep": pauses.append, "quarantine": tmp_path}
    with pytest.raises(RewardError, match=r"refused 3.*tried 3 times") as caught:
        rewards(flaky, **options).score(IMAGES, PROMPTS)
    assert len(flaky.calls) == 3
    assert pauses == [1.0, 2.0]
    assert caught.value.indices == [0, 1]
    assert isinstance(caught.value.__cause__, ConnectionError)
    pauses.clear()
    with pytest.raises(RewardError):
        rewards(Flaky(1), **options).score(IMAGES, PROMPTS)
    assert pauses == []


def test_a_set_is_checked_as_a_whole_before_anything_is_built(tmp_path: Path) -> None:
    source = "class Loud:\n    def __init__(self):\n        raise SystemExit('was built')\n"
    (tmp_path / "loud.py").write_text(source)
    specs = [
        RewardSpec(f"{tmp_path}/loud.py:Loud"),
        RewardSpec("glod"),
        RewardSpec("jpeg_compressibility", 1, {"q": 1}),
    ]
    with pytest.raises(ValueError, match=r"'glod'; did you mean 'gold'") as caught:
        RewardSet(specs)
    assert "no option 'q'" in str(caught.value)
    with pytest.raises(ValueError, match=r"two rewards are called 'jpeg_compressibility'.*`label`"):
        RewardSet([RewardSpec("jpeg_compressibility")] * 2)
    with pytest.raises(ValueError, match="at least one"):
        RewardSet([])


def test_close_reaches_every_reward_even_past_a_fault() -> None:
    closed: list[str] = []

    class Server(Spy):
        label: str

        def close(self) -> None:
            closed.append(self.label)
            if self.label == "a":
                raise OSError("already gone")

    with pytest.raises(RewardError, match="'r0' failed while it was closed: OSError: already gone"):
        rewards(Server(label="a"), Spy(), Server(label="b")).close()
    assert closed == ["a", "b"]


def test_the_line_of_a_users_own_code_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef mine(completions, **_):\n    return [json.loads(c) for c in completions]\n")
    rewards = RewardSet([RewardSpec(f"{file}:mine")])
    with pytest.raises(RewardError, match=rf"sample 1 \(prompt 'b'\), at {file}:5: JSONDecodeError: "):
        rewards.score(["1", "x"], ["a", "b"])


@pytest.mark.parametrize(
    ("name", "columns", "end"),
    [
        ("solution", ["level", "answer"], "their columns: answer, level; the run adds {}."),
        ("answers", ["level", "answer"], "their columns: answer, level; the run adds {}; did you mean 'answer'?"),
        ("solution", [], "their columns: none; the run adds {}."),
        ("completion", [], "their columns: none; the run adds {}; did you mean 'completions' or 'completion_ids'?"),
    ],
)
def test_of_a_missing_column_the_columns_of_the_data_are_listed_first(name: str, columns: list[str], end: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def mine(completions, {name}): return [0.0]", scope)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Reward(scope["mine"], "mine").check("completions", [*columns, "completion_ids", "truncated"], grouped=True)
    said = end.format("completion_ids, completions, groups, prompts, truncated")
    assert str(caught.value) == f"reward 'mine' takes `{name}`, which the prompts do not have; {said}"
