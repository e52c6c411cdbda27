"""SDAR loads by path without its own code, writes block after block, trains with the recipes of masked models."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import MaskedRecipe
from flowgrpo.core.token_penalties import kl_old
from flowgrpo.inference.text_inference import open_weights, recipe_of, task_of
from flowgrpo.samplers.plans import branch_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.transitions import Velocity
from flowgrpo.samplers.unmasking import MaskMoves, confidence, mask_levels, unmask_kernel
from flowgrpo.text.finished_blocks import FinishedBlocks
from flowgrpo.text.masked_model import MaskedLanguageModel, load_masked_model
from flowgrpo.training.masked.masked_objective import MaskedObjective
from flowgrpo.training.masked.masked_policy import MaskedPolicy
from flowgrpo.training.masked.masked_task import MaskedTask
from flowgrpo.training.planning import forecast
from flowgrpo.training.session import start
from flowgrpo.training.trainer import Trainer
from tests.simulated import simulated_device
from tests.text.diffusion_folders import BLOCK_FOLDERS, SDAR_SPECIAL, llada2_folder, llada_folder, sdar_folder
from tests.text.test_diffusion_models import prompts, words_of

__all__ = ["prompts"]
KINDS = tuple(BLOCK_FOLDERS)
IN_BLOCKS = ("model.block=4", "generation.tokens=8", "sampler.steps=4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("blocks")
    return {kind: make(place / kind) for kind, make in BLOCK_FOLDERS.items()}


def loaded(folders: dict[str, Path], kind: str, **options: Any) -> MaskedLanguageModel:
    return load_masked_model(str(folders[kind]), **{"block": 4, **options})


def drawn(language: MaskedLanguageModel) -> tuple[Tensor, Tensor]:
    """[2, 12] completions, and their first form, in which the second block of each is open."""
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    x = ids.clone()
    x[:, 8:] = language.mask
    x[0, 5] = x[1, 4] = x[1, 7] = language.mask
    return ids, x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_of_the_open_block_and_know_nothing_of_later_blocks(
    folders: dict[str, Path], kind: str, attention: str
) -> None:
    language = loaded(folders, kind, attention=attention, chat=False)
    frames = [language.encode("one and two"), language.encode("9")]
    _, x = drawn(language)
    together = language.logits(frames, x)
    assert together.shape == (2, 4, 264)
    for row in range(2):
        alone = language.logits(frames[row : row + 1], x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)
    later, earlier, beside = x.clone(), x.clone(), x.clone()
    later[:, 9], earlier[:, 0], beside[:, 6] = 7, 7, 7
    assert torch.equal(language.logits(frames, later), together)
    for changed in (earlier, beside):
        assert (language.logits(frames, changed) - together).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_are_scored_at_once_as_each_is_when_it_is_written(folders: dict[str, Path], kind: str) -> None:
    language = loaded(folders, kind, chat=False)
    frames = [language.encode("one and two"), language.encode("9")]
    ids, _ = drawn(language)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    hidden[:, ::4] = True  # an open block has a mask
    noised = torch.where(hidden, language.mask, ids)
    everywhere = torch.arange(12).expand_as(ids)
    found = language.scored_logits(frames, noised, ids, everywhere)
    assert found.shape == (2, 12, 264)
    for start_of in (0, 4, 8):
        state = torch.cat([ids[:, :start_of], noised[:, start_of:]], dim=1)
        written = language.logits(frames, state)
        torch.testing.assert_close(found[:, start_of : start_of + 4], written, rtol=1e-4, atol=1e-5)


def test_special_tokens_and_the_size_of_a_block(folders: dict[str, Path]) -> None:
    language = loaded(folders, "sdar")
    named = language.tokenizer.convert_tokens_to_ids
    assert language.mask == named("<|MASK|>") == 256 + SDAR_SPECIAL.index("<|MASK|>")
    assert language.ends == (named("<|endoftext|>"), named("<|im_end|>"))
    assert task_of(str(folders["sdar"])) == "masked"
    for words, expected in (((), (256, 4, "confidence")), (("generation.tokens=16", "model.block=2"), (16, 2, None))):
        recipe = recipe_of(str(folders["sdar"]), words)
        assert isinstance(recipe, MaskedRecipe)
        order = recipe.sampler.order.short if expected[2] else None
        assert (recipe.sampler.steps, recipe.model.block, order) == expected


@pytest.mark.parametrize("cache", ["true", "false"])
@pytest.mark.parametrize("words", [(), ("model.block=4",), ("generation.tokens=16", "sampler.steps=8")])
def test_the_cache_may_be_named_where_it_is_chosen_already(
    folders: dict[str, Path], cache: str, words: tuple[str, ...]
) -> None:
    recipe = recipe_of(str(folders["sdar"]), [*words, f"rollout.cache={cache}"])
    assert isinstance(recipe, MaskedRecipe)
    assert recipe.rollout.cache == (cache == "true")
    assert recipe.model.block == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evaluate.steps=3"], "with evaluate.steps=3, a step would reveal tokens of two blocks"),
        (
            ["sampler.plan={name: spine, splits: [0, 1], width: 2, completions: [1, 2]}", "rollout.group=1"],
            "a step goes from 2 to 6 tokens at once, and the model writes one block of 4 tokens",
        ),
    ],
)
def test_steps_over_two_blocks_are_refused_before_a_model_is_loaded(words: list[str], says: str) -> None:
    recipe = load_recipe("masked", ["model.path=nowhere", *IN_BLOCKS, "evaluate.steps=4"])
    assert isinstance(recipe, MaskedRecipe)
    forecast(recipe)
    with pytest.raises(ValueError, match=says):
        forecast(load_recipe("masked", ["model.path=nowhere", *IN_BLOCKS, *words]))  # type: ignore[arg-type]


def test_llada2_samples_as_its_page_does(folders: dict[str, Path]) -> None:
    recipe = recipe_of(str(folders["llada2"]))
    assert isinstance(recipe, MaskedRecipe)
    order = recipe.sampler.order
    assert (recipe.sampler.steps, recipe.model.block, order.short, order["threshold"]) == (256, 32, "confidence", 0.95)
    assert recipe.generation.stop_at_end
    assert loaded(folders, "llada2").ends[0] == 256 + 1


def test_a_block_is_asked_for_and_refused_where_there_is_none(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"writes block after block; say how many .*, as in model\.block=4"):
        loaded(folders, "sdar", block=None)
    with pytest.raises(
        ValueError, match=r"model\.block is 4, and in .* each token sees all others; leave model\.block"
    ):
        load_masked_model(str(llada_folder(tmp_path / "llada")), block=4)
    with pytest.raises(ValueError, match=r"model\.attention is flash_attention_2, which has no blocks.* use sdpa"):
        loaded(folders, "sdar", attention="flash_attention_2")
    folder = sdar_folder(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_sliding_window": True}))
    with pytest.raises(ValueError, match="use_sliding_window is True, and SDAR is known with False only"):
        load_masked_model(str(folder), block=4)
    folder = llada2_folder(tmp_path / "another")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_qk_norm": False}))
    with pytest.raises(ValueError, match="this LLaDA 2 cannot be loaded: use_qk_norm is False, and LLaDA 2 is known"):
        load_masked_model(str(folder), block=4)


def trainer_of(folder: Path, prompts: Path, run: Path, recipe: str, *more: str, train: str = "lora") -> Trainer:
    words = [*words_of(folder, prompts, train), *IN_BLOCKS, *more]
    return start(load_recipe(recipe, words), run).trainer(Silent())


RECIPES = (
    "masked", "masked_window", "masked_branch", "diffu_grpo", "coupled_grpo", "gdpo_masked", "uni_grpo", "wd1",
    "trace_rl", "spg",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        *((recipe, "sdar") for recipe in RECIPES),
        *((recipe, kind) for recipe in ("masked", "trace_rl") for kind in KINDS[1:]),
    ],
)
def test_a_run_ends_with_weights_that_load(
    recipe: str, kind: str, folders: dict[str, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, train = tmp_path / "run", "full" if recipe == "coupled_grpo" else "lora"
    result = run / ("lora" if train == "lora" else "model")
    # The tree of `masked_branch` has 16 leaves.
    more = ("rollout={prompts: 2, group: 16, batch: 8}",) if recipe == "masked_branch" else ()
    trainer_of(folders[kind], prompts, run, recipe, *more, train=train).train()
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["ratio/first_error"] == 0.0
    assert first["grad_norm"] > 0
    settings = recipe_of(str(run))
    assert isinstance(settings, MaskedRecipe)
    found = open_weights(str(run), settings).pipe
    frame, x = found.encode("say 7"), torch.full((1, 8), found.mask)
    base = loaded(folders, kind).logits([frame], x)
    assert (found.logits([frame], x) - base).abs().max() > 1e-3
    if train == "full":
        saved = json.loads((result / "config.json").read_text())
        assert (saved["block_size"], saved["rope_theta"]) == (4, 1000000.0)
    card = (run / ("lora" if train == "lora" else "model") / "README.md").read_text()
    assert "block=4)" in card
    program = card.split("```python\n")[1].split("```")[0]
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(compile(program, "card", "exec"), names)
    expected = found.logits([found.encode("a prompt")], x)
    torch.testing.assert_close(names["logits"], expected, rtol=1e-5, atol=1e-5)


def gradients(trainer: Trainer, experience: Any, advantages: Tensor) -> Iterator[Tensor]:
    objective = trainer.objective
    assert isinstance(objective, MaskedObjective)
    objective.prepare(experience)
    rows = torch.tensor(float(objective.rows(experience, 0, None)))
    for batch in objective.batches(experience, 0, None):
        objective.backward(experience, batch, advantages, None, rows)
    for weight in trainer.task.weights.parameters():
        assert weight.grad is not None
        yield weight.grad.clone()
        weight.grad = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shrink", "threshold", "passes"), [(1, "null", [4]), (2, "null", [2]), (1, "0.004", [2, 3, 4])]
)
def test_a_trace_in_few_passes_has_the_gradient_of_the_recorded_steps(
    shrink: int, threshold: str, passes: list[int], folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    """Eight steps write two blocks. Their log-probs come from four passes, or from two if a pass holds two steps."""
    more = ("sampler.steps=8", "optimizer.updates=1", f"sampler.order.threshold={threshold}")
    plain = trainer_of(folders["sdar"], prompts, tmp_path / "plain", "masked", *more, train="full")
    traced = trainer_of(
        folders["sdar"], prompts, tmp_path / "traced", "trace_rl", *more, f"objective.likelihood.shrink={shrink}",
        train="full",
    )  # fmt: skip
    for trainer in (plain, traced):
        assert isinstance(trainer.task, MaskedTask)
    experience = plain.collect(0)[1]
    leaves = torch.linspace(-1.0, 1.0, len(experience.rollout.leaf))
    # Every edge on the way to a completion has the advantage of the completion.
    advantages, parent = torch.zeros(len(experience.rollout.parent)), experience.rollout.parent.tolist()
    for leaf, value in zip(experience.rollout.leaf.tolist(), leaves):
        while leaf >= 0:
            advantages[leaf], leaf = value, parent[leaf]
    objective = traced.objective
    assert isinstance(objective, MaskedObjective)
    objective.prepare(experience)
    assert len(list(objective.batches(experience, 0, None))) in passes
    pairs = list(zip(*(list(gradients(one, experience, advantages)) for one in (plain, traced)), strict=True))
    worst = max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-6)) for one, other in pairs)
    assert worst < 1e-3 if shrink == 1 else worst > 1e-2


def test_the_kl_to_the_policy_before_an_update_by_hand() -> None:
    """Log-ratios of 0 and 1: e^-d - 1 + d, with the derivative 1 - e^-d; and half of the square, with d."""
    logp, old = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.tensor([[-1.0, -2.0]])
    for kind, value, slope in (("k3", math.exp(-1), 1 - math.exp(-1)), ("k2", 0.5, 1.0), ("k3+", math.exp(-1), 1.0)):
        found = kl_old(logp, old, kind=kind)  # type: ignore[arg-type]
        assert found.tolist()[0] == pytest.approx([0.0, value])
        assert torch.autograd.grad(found.sum(), logp)[0].tolist()[0] == pytest.approx([0.0, slope])


@pytest.mark.slow
def test_trace_rl_with_the_kl_of_its_code(folders: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    more = ("penalties=[{name: kl_old, weight: 0.01}]", "optimizer.updates=2")
    trainer_of(folders["sdar"], prompts, tmp_path / "run", "trace_rl", *more).train()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["kl_old"] > 0
    with pytest.raises(ValueError, match="kl_old compares with the policy that sampled, and has no effect before"):
        load_recipe("trace_rl", [more[0], "optimizer.updates=1"])


@pytest.mark.slow
def test_a_run_on_another_device_leaves_no_tensor_behind(
    folders: dict[str, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    with simulated_device() as device:
        monkeypatch.setattr(Accelerator, "device", property(lambda self: device.device))
        for recipe in ("masked", "trace_rl"):
            trainer = trainer_of(folders["sdar"], prompts, tmp_path / recipe, recipe)
            trainer.train()
            assert all(p.device == device.device for p in trainer.task.weights.parameters())


def test_a_schedule_that_is_learned_is_refused(folders: dict[str, Path], prompts: Path) -> None:
    with pytest.raises(ValueError, match=r"pacing draws how many masks .* and model\.block is 4; leave the extension"):
        load_recipe("co_grpo", [*words_of(folders["sdar"], prompts, "lora"), *IN_BLOCKS])


@pytest.mark.slow
def test_steps_that_do_not_end_with_blocks_are_refused_before_the_run(
    folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"with sampler\.steps=3, a step would reveal tokens of two blocks"):
        trainer_of(folders["sdar"], prompts, tmp_path / "one", "masked", "sampler.steps=3")
    with pytest.raises(ValueError, match=r"with evaluate\.steps=1, a step would reveal tokens of two blocks"):
        trainer_of(folders["sdar"], prompts, tmp_path / "two", "masked", "evaluate.steps=1")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_a_cache_are_those_without_and_finished_blocks_are_not_evaluated_again(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    language = loaded(folders, kind, chat=False)
    frames = [language.encode("one and two"), language.encode("9")]
    cached, widths, call = FinishedBlocks(language), list[int](), language.model.with_past

    def counted(ids: Tensor, *more: Any) -> Any:
        widths.append(ids.shape[1])
        return call(ids, *more)

    monkeypatch.setattr(language.model, "with_past", counted)

    def logits(x: Tensor, i: int, rows: Any) -> Tensor:
        chosen = [frames[row] for row in rows]
        found, wanted = cached.logits(chosen, x), language.logits(chosen, x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        return wanted

    steps = tuple(range(8))
    plan = window_plan(mask_levels(16, 8, block=4), steps, unmask_kernel(1.0), samples=6, stochastic=steps)
    with torch.no_grad():
        moves = MaskMoves(16, language.mask, confidence, block=4)
        rollout = RolloutRunner(logits, plan, moves=moves, batch=6).run([1, 2])
    assert len({tuple(row) for row in rollout.x.tolist()}) == 12
    # The two roots evaluate their prompts of up to 11 tokens. Two batches of their children go on from there.
    assert widths == [15] + [4, 4] + [8, 8, 4, 4] * 3


# Random weights give each of 264 tokens a chance of about 0.004.
UNEVEN = ("sampler.order.threshold=0.004", "generation={tokens: 24, stop_at_end: true}", "sampler.steps=24")


@pytest.fixture
def soon_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the vocabulary ends a text, so that texts of random weights have ends."""
    monkeypatch.setattr(MaskedLanguageModel, "ends", tuple(range(10, 36)))


def with_and_without_a_cache(folder: Path, prompts: Path, run: Path) -> tuple[MaskedPolicy, Velocity]:
    """A policy of uneven completions, and its logits after two prompts, which are the same with a cache and without."""
    trainer = trainer_of(folder, prompts, run, "trace_rl", *UNEVEN)
    assert isinstance(trainer.task, MaskedTask)
    policy = trainer.task.policy
    frames = [policy.frame(text) for text in ("say 7", "from one to nine and back")]
    cached, plain = policy.logits_of(frames, cached=True), policy.logits_of(frames)

    def compared(x: Tensor, i: int, rows: Any) -> Tensor:
        found, wanted = cached(x, i, rows), plain(x, i, rows)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        return wanted

    return policy, compared


@pytest.mark.slow
@pytest.mark.usefixtures("soon_ended")
@pytest.mark.parametrize("batch", [3, 8])
def test_rows_of_a_cache_may_be_at_different_blocks_and_leave_it(
    batch: int, folders: dict[str, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, compared = with_and_without_a_cache(folders["sdar"], prompts, tmp_path / "run")
    steps = tuple(range(24))
    plan = window_plan(mask_levels(24, 24, block=4), steps, unmask_kernel(1.0), samples=9, stochastic=steps)
    model, slots = policy.language.model, list[int]()
    call = model.with_past

    def seen(ids: Tensor, mask: Tensor, *more: Any) -> Any:
        slots.append(mask.shape[2])
        return call(ids, mask, *more)

    monkeypatch.setattr(model, "with_past", seen)
    places = set[int]()

    def logits(x: Tensor, i: int, rows: Any) -> Tensor:
        going = x[policy.moves.going(x)]
        places.add(len(((going == policy.moves.mask).int().argmax(1) // 4).unique()))
        return compared(x, i, rows)

    with torch.no_grad():
        rollout = RolloutRunner(logits, plan, moves=policy.moves, batch=batch).run([1, 2])
    assert max(places) > 1  # rows of a batch were at different blocks
    lengths = policy.moves.counted(rollout.x).sum(1)
    assert len(lengths.unique()) > 4
    assert bool((rollout.x == policy.moves.mask).any())
    # A prompt of up to 25 tokens, 24 tokens, and at most a third of the places without anything.
    assert max(slots) < 1.5 * (25 + 24) + 8


@pytest.mark.slow
@pytest.mark.usefixtures("soon_ended")
@pytest.mark.parametrize("batch", [3, 50])
def test_states_of_a_tree_go_on_from_the_cache_of_their_parents(
    batch: int, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    policy, compared = with_and_without_a_cache(folders["sdar"], prompts, tmp_path / "run")
    plan = branch_plan(mask_levels(24, 24, block=4), [3, 9, 15], unmask_kernel(1.0), width=3)
    with torch.no_grad():
        rollout = RolloutRunner(compared, plan, moves=policy.moves, batch=batch).run([1, 2])
    assert len(rollout.leaf) == 2 * 27


@pytest.mark.slow
@pytest.mark.usefixtures("soon_ended")
@pytest.mark.parametrize(
    "recipe",
    [
        "masked",
        "masked_window",
        "masked_branch",
        "diffu_grpo",
        "coupled_grpo",
        "wd1",
        "gdpo_masked",
        "uni_grpo",
        "trace_rl",
        "spg",
    ],
)
@pytest.mark.parametrize("block", ["4", "null"])
def test_completions_of_uneven_steps_and_lengths_are_trained(
    recipe: str, block: str, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    folder = folders["sdar"] if block == "4" else llada_folder(tmp_path / "llada")
    more = [*UNEVEN, f"model.block={block}"]
    more += ["rollout={prompts: 2, group: 16, batch: 8}"] if recipe == "masked_branch" else []
    trainer_of(folder, prompts, tmp_path / "run", recipe, *more).train()
    first, last = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2])
    assert first["ratio/first_error"] == last["ratio/first_error"] == 0.0
    assert first["grad_norm"] > 0
    assert all(math.isfinite(value) for value in last.values() if isinstance(value, float))
    states = first["evaluations"]
    plan = trainer_of(folder, prompts, tmp_path / "other", recipe, *more).task.plan_for(0).counts().evaluations * 2
    assert states < 0.9 * plan


@pytest.mark.slow
@pytest.mark.usefixtures("soon_ended")
@pytest.mark.parametrize("block", ["4", "null"])
def test_only_scored_tokens_have_logits_and_rows_end_with_the_last_of_them(
    block: str, folders: dict[str, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["sdar"] if block == "4" else llada_folder(tmp_path / "llada")
    trainer = trainer_of(folder, prompts, tmp_path / "run", "trace_rl", *UNEVEN, f"model.block={block}")
    assert isinstance(trainer.task, MaskedTask)
    policy = trainer.task.policy
    language, mask = policy.language, policy.moves.mask
    frames = [policy.frame(text) for text in ("say 7", "from one to nine")]
    draw = torch.Generator().manual_seed(3)
    ids, masked = torch.randint(40, 200, (2, 24), generator=draw), torch.rand(2, 24, generator=draw) < 0.6
    ids[0, 9:], ids[1, 14:] = mask, mask
    scored = masked & (ids != mask) & (torch.rand(2, 24, generator=draw) < 0.7)
    everywhere = torch.arange(24).expand_as(ids)
    whole = language.scored_logits(frames, torch.where(masked, mask, ids), ids, everywhere)
    whole[..., mask] = -torch.inf
    wanted = whole.log_softmax(-1).gather(2, ids[..., None])[..., 0].masked_fill(~scored, 0.0)
    shapes = list[tuple[int, ...]]()
    call = MaskedLanguageModel.scored_logits

    def seen(self: Any, frames: Any, x: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        shapes.append((x.shape[1], places.shape[1]))
        return call(self, frames, x, ids, places)

    monkeypatch.setattr(MaskedLanguageModel, "scored_logits", seen)
    found = policy.token_log_probs(frames, ids, masked, scored)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    # Both rows are scored up to place 13. Without blocks, tokens see the masks that follow.
    assert shapes == [(16 if block == "4" else 24, int(scored.sum(1).max()))]
    assert policy.token_log_probs(frames, ids, masked, scored & False).tolist() == [[0.0] * 24] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("soon_ended")
def test_texts_say_how_many_steps_wrote_how_many_tokens(
    folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(folders["sdar"], prompts, tmp_path / "run", "trace_rl", *UNEVEN)
    experience = trainer.collect(0)[1]
    mask = load_masked_model(str(folders["sdar"]), block=4).mask
    written, taken = (experience.rollout.x != mask).sum(1), [len(one["steps"]) for one in experience.origins()]
    assert experience.described() == [
        f"{tokens} tokens in {steps} step{'s' if steps > 1 else ''}" for tokens, steps in zip(written.tolist(), taken)
    ]
    assert len(set(taken)) > 1
    assert all(steps[-1] == text for steps, text in zip((o["steps"] for o in experience.origins()), experience.samples))


@pytest.mark.slow
def test_a_run_with_a_cache_is_nearly_the_run_without(folders: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    rewards = []
    for name, more in (("plain", ()), ("cached", ("rollout.cache=true",))):
        trainer_of(folders["sdar"], prompts, tmp_path / name, "trace_rl", *more).train()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert lines[0]["ratio/first_error"] == 0.0
        rewards.append([line.get("reward/total") for line in lines])
    assert rewards[0] == rewards[1]


def test_a_cache_is_refused_where_it_would_move_a_ratio_or_has_no_blocks(
    folders: dict[str, Path], prompts: Path
) -> None:
    words = [*words_of(folders["sdar"], prompts, "lora"), "rollout.cache=true"]
    with pytest.raises(ValueError, match=r"rollout\.cache changes the rounding of the steps that objective trajectory"):
        load_recipe("masked", [*words, *IN_BLOCKS])
    with pytest.raises(ValueError, match=r"rollout\.cache keeps finished blocks, and model\.block is left out"):
        load_recipe("trace_rl", words)
