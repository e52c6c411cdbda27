"""Rewards that run elsewhere score a chunk while the next is sampled, and give the same scores as without overlap."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.rewards import Reward, RewardError, RewardSet, Scores
from flowgrpo.rewards.registry import RewardSpec
from flowgrpo.training.collecting import OverlappedScoring, runs_elsewhere
from flowgrpo.training.session import start
from tests.rewards.served import Served

CPU = torch.device("cpu")
LEVELS = torch.tensor([0.1, 0.2, 0.4, 0.8])
IMAGES = LEVELS.view(4, 1, 1, 1).expand(4, 3, 2, 2)
PROMPTS = ["a", "a", "b", "b"]
GROUPS = [0, 0, 1, 1]
SOON = 60.0


class Scorer:
    """Ten times the brightness, remembered call by call with its thread; waits for `may_go` where there is one."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[list[float]] = []
        self.threads: set[int] = set()
        self.begun, self.may_go = threading.Event(), None
        self.__dict__.update(attributes)

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], groups: Sequence[int] | None = None) -> Scores:
        values = (10 * images.flatten(1).mean(1)).round(decimals=4).tolist()
        self.calls.append(values)
        self.threads.add(threading.get_ident())
        self.begun.set()
        if self.may_go is not None:
            assert self.may_go.wait(SOON)
        return Scores(
            values, {"half": [v / 2 for v in values]}, [f"{p}{g}" for p, g in zip(prompts, groups or prompts)]
        )


def rewards(*functions: Callable[..., Any], **options: Any) -> RewardSet:
    return RewardSet([Reward(f, f"r{k}", weight=k + 1.0) for k, f in enumerate(functions)], **options)


def begin(ahead: OverlappedScoring, first: int, stop: int) -> None:
    ahead.begin(IMAGES[first:stop], PROMPTS[first:stop], {}, GROUPS[first:stop])


@pytest.mark.parametrize(
    ("attributes", "device", "elsewhere"),
    [
        ({"remote": True}, "cpu", True),
        ({}, "cpu", False),
        ({}, "cuda:0", False),
        ({"device": "cpu"}, "cpu", False),
        ({"device": "cpu"}, "cuda:0", True),
        ({"device": torch.device("cuda", 1)}, "cuda:0", True),
        ({"device": "cuda"}, "cuda:0", False),
        ({"device": "cuda:0"}, "cuda:0", False),
        ({"device": "cuda:0", "remote": True}, "cuda:0", True),
    ],
)
def test_which_rewards_run_elsewhere(attributes: dict[str, Any], device: str, elsewhere: bool) -> None:
    assert runs_elsewhere(Reward(Scorer(**attributes), "r"), torch.device(device)) is elsewhere


def test_scores_of_chunks_are_those_of_the_whole() -> None:
    """Brightness 0.1, 0.2, 0.4 and 0.8, by a reward here and one elsewhere, in two chunks of a group each."""
    near, far = Scorer(), Scorer(remote=True)
    both = rewards(near, far)
    with OverlappedScoring(both, CPU) as ahead:
        begin(ahead, 0, 2)
        begin(ahead, 2, 4)
        found = ahead.scores(IMAGES, PROMPTS, {}, GROUPS)
    assert found.names == ("r0", "r1")
    assert found.weights.tolist() == [1.0, 2.0]
    assert found.values.tolist() == [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]]
    assert found.sub_scores == {"r0": {"half": [0.5, 1.0, 2.0, 4.0]}, "r1": {"half": [0.5, 1.0, 2.0, 4.0]}}
    assert found.notes == {"r0": ["a0", "a0", "b1", "b1"], "r1": ["a0", "a0", "b1", "b1"]}
    assert found.seconds.keys() == {"r0", "r1"}
    assert near.calls == [[1.0, 2.0, 4.0, 8.0]]
    assert far.calls == [[1.0, 2.0], [4.0, 8.0]]
    assert near.threads == {threading.get_ident()}
    assert not far.threads & near.threads
    whole = both.score(IMAGES, PROMPTS, {}, GROUPS)
    assert torch.equal(found.values, whole.values)
    assert (found.sub_scores, found.notes, found.answers) == (whole.sub_scores, whole.notes, whole.answers)


def test_a_second_rollout_is_scored_by_itself() -> None:
    far = Scorer(remote=True)
    with OverlappedScoring(rewards(far), CPU) as ahead:
        for _ in range(2):
            begin(ahead, 0, 2)
            begin(ahead, 2, 4)
            assert ahead.scores(IMAGES, PROMPTS, {}, GROUPS).values[:, 0].tolist() == [1.0, 2.0, 4.0, 8.0]


def test_without_chunks_everything_is_scored_at_once() -> None:
    far = Scorer(remote=True)
    with OverlappedScoring(rewards(far), CPU) as ahead:
        ahead.scores(IMAGES, PROMPTS, {}, GROUPS)
    assert far.calls == [[1.0, 2.0, 4.0, 8.0]]
    assert far.threads == {threading.get_ident()}


def test_remote_rewards_do_not_wait_for_each_other_and_those_of_a_device_take_turns() -> None:
    gate = threading.Event()
    slow, quick = Scorer(remote=True, may_go=gate), Scorer(remote=True)
    one, other = Scorer(device="meta"), Scorer(device="meta")
    for scorer in (one, other):
        scorer.__class__ = type("Apart", (Scorer,), {"__call__": lambda self, prompts: self.note(prompts)})
        scorer.note = lambda prompts, scorer=scorer: scorer.threads.add(threading.get_ident()) or [0.0] * len(prompts)
    with OverlappedScoring(rewards(slow, quick, one, other), CPU) as ahead:
        begin(ahead, 0, 4)
        assert quick.begun.wait(SOON)
        assert slow.begun.wait(SOON)
        gate.set()
        ahead.scores(IMAGES, PROMPTS, {}, GROUPS)
    assert one.threads == other.threads
    assert len(slow.threads | quick.threads | one.threads) == 3


def test_a_failure_names_the_sample_and_keeps_it_as_without_chunks(tmp_path: Path) -> None:
    """The third of four samples begins the second chunk; a failure of a remote reward concerns its whole call."""

    class Broken:
        remote, batch_size = True, 1

        def __call__(self, prompts: Sequence[str]) -> list[float]:
            if "b" in prompts:
                raise RuntimeError("the server said no")
            return [0.0] * len(prompts)

    def failure(folder: Path, chunks: Sequence[tuple[int, int]]) -> RewardError:
        chosen = rewards(Broken(), quarantine=folder, retries=1, sleep=lambda seconds: None)
        with OverlappedScoring(chosen, CPU) as ahead:
            for chunk in chunks:
                begin(ahead, *chunk)
            with pytest.raises(RewardError) as caught:
                ahead.scores(IMAGES, PROMPTS, {}, GROUPS)
        return caught.value

    whole, parts = failure(tmp_path / "whole", []), failure(tmp_path / "parts", [(0, 2), (2, 4)])
    assert str(whole).replace("whole", "parts") == str(parts)
    assert parts.index == 2
    assert "sample 2 (prompt 'b')" in str(parts)
    assert "tried 2 times" in str(parts)
    kept = {folder: sorted(f.relative_to(folder) for f in folder.rglob("*.*")) for folder in tmp_path.iterdir()}
    assert kept[tmp_path / "whole"] == kept[tmp_path / "parts"]
    assert Path("r0-0000/sample-0002.png") in kept[tmp_path / "parts"]


def test_a_failure_is_raised_before_more_is_sampled() -> None:
    ended = threading.Event()

    class Broken:
        remote = True

        def __call__(self, images: torch.Tensor) -> list[float]:
            raise RuntimeError("no")

    def sleep(seconds: float) -> None:
        raise AssertionError("no retries were asked for")

    chosen = rewards(Broken(), retries=0, sleep=sleep)
    with OverlappedScoring(chosen, CPU) as ahead:
        begin(ahead, 0, 2)
        (future,) = ahead._begun[0]
        future.add_done_callback(lambda _: ended.set())
        assert ended.wait(SOON)
        with pytest.raises(RewardError, match="a call with samples 0 to 1"):
            begin(ahead, 2, 4)


def test_a_run_that_fails_does_not_wait_for_an_answer_from_elsewhere() -> None:
    gate = threading.Event()
    far = Scorer(remote=True, may_go=gate)

    def fails() -> None:
        with OverlappedScoring(rewards(far), CPU) as ahead:
            begin(ahead, 0, 2)
            begin(ahead, 2, 4)
            assert far.begun.wait(SOON)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    gate.set()
    (line,) = [thread for thread in threading.enumerate() if thread.ident in far.threads]
    line.join(SOON)
    assert not line.is_alive()
    assert line.daemon
    # The second chunk was not begun.
    assert far.calls == [[1.0, 2.0]]


# -- runs ------------------------------------------------------------------------------------------------------------

LEVEL = "def level(images, prompts, **columns):\n    return images.flatten(1).mean(1).tolist()\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "served.py"
    file.write_text(LEVEL)
    server = Served(f"{file}:level")
    yield server
    server.close()


def overrides(small: list[str], *rewards: str, rollout: str = "") -> list[str]:
    """Three prompts of three images, in batches of a group."""
    return [
        *small, "sampler.plan.shared_noise=false",
        f"rollout={{prompts: 3, group: 3, batch: 3, decode_batch: 3{rollout}}}",
        f"rewards=[{', '.join(rewards)}]", "evaluate.rewards=[{name: gold}]", "optimizer.updates=2",
        "run={iterations: 2, checkpoint_every: 1, sample_every: 1, seed: 0}",
    ]  # fmt: skip


def test_a_chunk_is_scored_over_http_before_the_next_is_decoded(
    small: list[str], served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server gets an image of chunk k before chunk k + 1 is decoded, and answers only once that is: neither waits
    for the other, so an iteration takes less than sampling and scoring in turn."""
    asked, decoded = [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]
    decode, answer = FlowPolicy.decode, served.service.reward.function
    counts = {"decoded": 0, "asked": 0}

    def watched_decode(self: FlowPolicy, *args: Any) -> torch.Tensor:
        chunk = counts["decoded"] = counts["decoded"] + 1
        assert chunk > 3 or chunk == 1 or asked[chunk - 1].wait(SOON), "the chunk before was not scored meanwhile"
        images = decode(self, *args)
        if chunk <= 3:
            decoded[chunk].set()
        return images

    def watched_answer(**arguments: Any) -> Any:
        chunk = counts["asked"] = counts["asked"] + 1
        asked[chunk].set()
        assert chunk == 3 or decoded[chunk + 1].wait(SOON), "the next chunk was not decoded meanwhile"
        return answer(**arguments)

    recipe = load_recipe(
        "mixgrpo_flash_guard",
        overrides(small, f"{{name: remote, options: {{url: '{served.url}'}}}}", rollout=", chunk: 1"),
    )
    trainer = start(recipe, tmp_path / "run").trainer(Silent())
    monkeypatch.setattr(FlowPolicy, "decode", watched_decode)
    monkeypatch.setattr(served.service.reward, "function", watched_answer)
    batch = trainer.collector.sample(0)
    experience, scores = batch.experience, batch.scores
    assert counts == {"decoded": 3, "asked": 3}
    # Brightness of the images themselves, in their order.
    assert torch.allclose(scores.values[:, 0], experience.samples.flatten(1).mean(1))


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_in_chunks_is_the_run_in_one(small: list[str], served: Served, tmp_path: Path, size: int) -> None:
    remote = f"{{name: remote, options: {{url: '{served.url}'}}}}"
    for name, rollout in (("whole", ""), ("chunks", f", chunk: {size}")):
        recipe = load_recipe(
            "mixgrpo_flash_guard", overrides(small, remote, "{name: gold, weight: 0.5}", rollout=rollout)
        )
        start(recipe, tmp_path / name).trainer(Silent()).train()
    assert contents(tmp_path / "whole") == contents(tmp_path / "chunks")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("branchgrpo", ["rollout.group=16"]),
        ("tempflow_grpo", ["sampler.plan.splits=[0, 2]"]),
        ("ac_flow", ["critic.warmup=1", "sampler.plan.window={name: random, size: 1, interval: 1, stop: 3}"]),
        ("diffusion_nft", ["rollout.batch=3", "objective.old={decay: 0.5, every: 1, rise: 0.2}"]),
        ("neighbor_grpo", ["sampler.plan.window.size=2"]),
        ("mixgrpo_flash_guard", ["rollout.budget={choice: variance, rounds: 2, most: 4}", "optimizer.updates=1"]),
    ],
)
def test_forms_and_trees_in_chunks(name: str, more: list[str], small: list[str], tmp_path: Path) -> None:
    """State by state, so that both compute on the same batches."""
    given = [entry for entry in small if name == "mixgrpo_flash_guard" or not entry.startswith("sampler.plan.window")]
    for run, rollout in (("whole", ""), ("chunks", ", chunk: 1")):
        base = overrides(given, "{name: gold, options: {dense: true}}", rollout=rollout)
        if name not in ("mixgrpo_flash_guard", "ac_flow"):
            # Trees and chains without noise have no noise of a window to share.
            base = [entry for entry in base if not entry.startswith("sampler.plan.shared_noise")]
        alone = ["rollout.prompts=2", "rollout.batch=1", "rollout.decode_batch=1"]
        start(load_recipe(name, [*base, *alone, *more]), tmp_path / run).trainer(Silent()).train()
    assert contents(tmp_path / "whole") == contents(tmp_path / "chunks")


def test_a_chunk_beyond_the_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout.chunk is 9 with 8 prompts per iteration; use at most 8"):
        load_recipe("mixgrpo_flash_guard", ["rollout.prompts=8", "rollout.chunk=9"])
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        load_recipe("mixgrpo_flash_guard", ["rollout.chunk=0"])


def test_spec_of_a_remote_reward_is_remote(served: Served) -> None:
    chosen = RewardSet([RewardSpec("remote", options={"url": served.url})])
    assert runs_elsewhere(chosen.rewards[0], CPU)
    chosen.close()
