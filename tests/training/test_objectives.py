"""Forms of the objective on the real loop: ratios of 1 before an update, gradients that add, masks that are obeyed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.forward_process import levels_to_draw
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.experience import Experience
from flowgrpo.training import updating
from flowgrpo.training.folder.checkpoint import read_checkpoint
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.losses.forward import ForwardObjective
from flowgrpo.training.losses.noise_levels import draw_steps
from flowgrpo.training.losses.objective import Outcome
from flowgrpo.training.losses.transition import TransitionObjective
from flowgrpo.training.planning import forecast, nfe_of
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer

FORWARD = ["diffusion_nft", "awm", "dgpo", "crd", "flow_dpo"]


def trainer_of(name: str, model: Path, folder: Path, *more: str) -> Trainer:
    overrides = [
        f"model.path={model}", "rollout={prompts: 2, group: 3, batch: 6}", "sampler.steps=4",
        "rewards=[{name: jpeg_compressibility}]", "optimizer.updates=1",
        "data.heldout=null", *more,
    ]  # fmt: skip
    if name not in FORWARD:
        # Losses of the forward process train no step, so no window bears on them.
        overrides = [*overrides, "sampler.plan.window={name: all}"]
    recipe = load_recipe(name, overrides)
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


def gradient(trainer: Trainer, e: Experience, advantages: torch.Tensor, keep: torch.Tensor | None = None):
    """Gradient of one part by name, and the outcomes of its batches."""
    rows = torch.tensor(float(trainer.objective.rows(e, 0, keep)))
    outcomes: list[Outcome] = [
        trainer.objective.backward(e, batch, advantages, keep, rows) for batch in trainer.objective.batches(e, 0, keep)
    ]
    found = {n: p.grad.clone() for n, p in trainer.task.weights.named_parameters().items() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return found, outcomes


@pytest.mark.parametrize("name", [*FORWARD, "neighbor_grpo"])
def test_at_rest_the_ratio_is_exactly_one_and_the_gradient_is_there(name, random_pipeline, tmp_path) -> None:
    trainer = trainer_of(name, random_pipeline, tmp_path / "run")
    _, e = trainer.collect(0)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    found, outcomes = gradient(trainer, e, advantages)
    assert all(float(o.error) == 0.0 for o in outcomes)
    assert max(float(g.abs().max()) for g in found.values()) > 0


@pytest.mark.parametrize("name", [*FORWARD, "neighbor_grpo"])
def test_gradients_do_not_depend_on_the_size_of_calls(name, random_pipeline, tmp_path) -> None:
    trainer = trainer_of(name, random_pipeline, tmp_path / "run")
    _, e = trainer.collect(0)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    whole, _ = gradient(trainer, e, advantages)
    trainer.task.policy.batch = 3
    if name == "neighbor_grpo":
        # Its batches are those of the rollout.
        _, e = trainer.collect(0)
    parts, _ = gradient(trainer, e, advantages)
    scale = max(float(g.abs().max()) for g in whole.values())
    assert all(float((whole[n] - parts[n]).abs().max()) < 1e-4 * scale for n in whole)


@pytest.mark.parametrize(("name", "calls"), [("diffusion_nft", 3), ("awm", 3), ("dgpo", 6), ("flow_dpo", 3)])
@pytest.mark.parametrize("noise", ["prompt", "image"])
def test_images_that_are_not_kept_are_evaluated_only_if_the_loss_compares_them(
    name: str, calls: int, noise: str, random_pipeline: Path, tmp_path: Path
) -> None:
    words = (f"objective.noise={noise}", "objective.times=1", "objective.skip=1")
    trainer = trainer_of(name, random_pipeline, tmp_path / "run", *words)
    _, e = trainer.collect(0)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    keep = torch.zeros(len(advantages), dtype=torch.bool)
    keep[e.rollout.leaf[[0, 2, 4]]] = True
    sizes = []
    (module,) = trainer.task.weights.modules.values()
    hook = module.register_forward_pre_hook(
        lambda _, args, given: sizes.append(len(given["hidden_states"])) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    few, _ = gradient(trainer, e, advantages, keep)
    hook.remove()
    assert sum(sizes) == calls
    # With several updates, all are evaluated, and the others have no gradient.
    trainer.objective.apart = False
    masked, _ = gradient(trainer, e, advantages, keep)
    scale = max(float(g.abs().max()) for g in masked.values())
    assert scale > 0
    assert all(float((few[n] - masked[n]).abs().max()) < 1e-4 * scale for n in masked)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.p=0.1", r"objective\.p: Input should be greater than or equal to 0\.2"),
        ("sampler.plan.spread=1e200", r"sampler\.plan\.spread: Input should be less than or equal to 1000"),
    ],
)
def test_neighbours_have_bounds_beyond_which_float32_has_nothing_left(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_recipe("neighbor_grpo", [word])


def test_batches_of_the_forward_process_hold_whole_groups_of_side_branches(random_pipeline, tmp_path) -> None:
    spine = "sampler.plan={name: spine, splits: [0, 1, 2], width: 4}"
    more = ["rollout={prompts: 2, group: 1, batch: 8}", spine]
    trainer = trainer_of("diffusion_nft", random_pipeline, tmp_path / "run", *more)
    _, e = trainer.collect(0)
    objective = trainer.objective
    assert isinstance(objective, ForwardObjective)
    batches = [batch.leaves for batch in objective.batches(e, 0, None)]
    assert {len(leaves) for leaves in batches} == {8}
    # 24 images in 6 groups, once for each noise level.
    levels = len(batches) // 3
    assert sorted(torch.cat(batches).tolist()) == sorted(list(range(24)) * levels)
    for leaves in batches:
        assert all(bool(torch.isin((e.groups == group).nonzero(), leaves).all()) for group in e.groups[leaves].unique())


@pytest.mark.parametrize("name", FORWARD)
def test_a_step_down_the_gradient_favours_the_better_image(name, random_pipeline, tmp_path) -> None:
    """Between two images of a group, the error of the better image falls relative to the error of the worse image."""
    trainer = trainer_of(name, random_pipeline, tmp_path / "run", "penalties=[]", "objective.times=null")
    _, e = trainer.collect(0)
    objective = trainer.objective
    assert isinstance(objective, ForwardObjective)
    better = torch.tensor([1.0, 0.0, -1.0] * 2, device=trainer.task.device)
    advantages = torch.zeros(len(e.rollout.parent), device=trainer.task.device)
    advantages[e.rollout.leaf] = better

    def gap() -> float:
        total = 0.0
        for batch in objective.batches(e, 0, None):
            x0, noise, x = objective._noised(e, batch)
            with torch.no_grad():
                errors = (objective._velocity(e, batch, x) - (noise - x0)).square().flatten(1).mean(1)
            total += float((errors * better).sum())
        return total

    before = gap()
    found, _ = gradient(trainer, e, advantages)
    norm = sum(float(g.square().sum()) for g in found.values()) ** 0.5
    with torch.no_grad():
        for n, p in trainer.task.weights.named_parameters().items():
            p -= 0.05 * found[n] / norm
    assert gap() < before


def test_several_updates_compare_with_the_policy_before_all_of_them(random_pipeline, tmp_path) -> None:
    trainer = trainer_of("awm", random_pipeline, tmp_path / "run", "optimizer.epochs=2", "optimizer.learning_rate=0.01")
    _, e = trainer.collect(0)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    record = trainer.update(e, advantages)
    assert record["ratio/first_error"] == 0.0
    assert record["log_ratio_sq"] > 0.0


def test_several_updates_keep_the_policy_that_sampled(random_pipeline, tmp_path) -> None:
    """The average moves with every optimizer step, but the weights that the rollout is compared with must not move."""
    more = ("optimizer.epochs=3", "optimizer.learning_rate=0.01", "objective.old={decay: 0.5, every: 1, rise: 0.5}")
    trainer = trainer_of("awm", random_pipeline, tmp_path / "run", *more)
    trainer.iterate(0)
    _, e = trainer.collect(1)
    objective = trainer.objective
    assert isinstance(objective, ForwardObjective)
    objective.prepare(e)
    batch = next(objective.batches(e, 0, None))
    x = objective._noised(e, batch)[2]
    with torch.no_grad(), trainer.averages["old"].applied():
        sampled = objective._velocity(e, batch, x)
    trainer.update(e, torch.linspace(-1, 1, len(e.rollout.parent)))
    with torch.no_grad():
        now = objective._velocity(e, batch, x)
    assert torch.equal(objective._old(e, batch, now), sampled)
    assert not torch.equal(now, sampled)


def test_other_weights_are_exchanged_once_for_an_optimizer_step(random_pipeline, tmp_path, monkeypatch) -> None:
    """An exchange moves all trained weights, so there must not be one for each batch."""
    more = ("model.train=full", "rollout.batch=3", "objective.old={decay: 0.9, every: 1}", "objective.times=3")
    far = "penalties=[{name: trust_region, weight: 3.0, radius: 0.2}]"
    trainer = trainer_of("diffusion_nft", random_pipeline, tmp_path / "run", *more, far)
    _, e = trainer.collect(0)
    assert len(list(trainer.objective.batches(e, 0, None))) == 6
    entered = Counter()

    def counting(name: str, weights: Any) -> Any:
        def entering() -> Any:
            entered[name] += 1
            return weights()

        return entering

    objective, policy = trainer.objective, trainer.objective.policy
    monkeypatch.setattr(objective, "old", counting("old", objective.old))
    monkeypatch.setattr(policy, "reference", counting("reference", policy.reference))
    trainer.update(e, torch.linspace(-1, 1, len(e.rollout.parent)))
    assert entered == {"old": 1, "reference": 1}
    trainer.objective.backward(
        e, next(objective.batches(e, 0, None)), torch.ones(len(e.rollout.parent)), None, torch.tensor(1.0)
    )
    assert entered == {"old": 2, "reference": 2}  # the predictions of before the update are not used again


@pytest.mark.parametrize(("name", "option"), [("diffusion_nft", "loss.beta"), ("awm", "loss.power")])
def test_options_of_an_objective_are_above_nothing(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"objective.{option}: Input should be greater than 0"):
        load_recipe(name, [f"objective.{option}=0.0"])


def test_the_sampling_policy_of_nft_lags_behind_and_survives_a_checkpoint(random_pipeline, tmp_path) -> None:
    more = ("objective.old={decay: 0.9, every: 1, rise: 0.5}", "run={iterations: 3, checkpoint_every: 1}")
    trainer = trainer_of("diffusion_nft", random_pipeline, tmp_path / "run", *more)
    for k in range(3):
        trainer.iterate(k)
    old = trainer.averages["old"].state_dict()["average"]
    now = trainer.task.weights.state_dict()
    assert any(not torch.equal(old[n], now[n]) for n in now)
    assert set(trainer.parts()) == {"optimizer", "ema", "old"}


def test_a_sampling_policy_that_equals_the_saved_average_is_that_average(
    random_pipeline, tmp_path, monkeypatch
) -> None:
    same = "{decay: 0.9, every: 1, rise: 0.5}"
    more = (f"objective.old={same}", f"optimizer.ema={same}", "run={iterations: 3, checkpoint_every: 2}")

    def trained(name: str) -> Trainer:
        trainer = trainer_of("diffusion_nft", random_pipeline, tmp_path / name, *more)
        trainer.train()
        return trainer

    one = trained("one")
    monkeypatch.setattr(updating, "one_average", lambda saved, old: False)
    two = trained("two")
    assert (set(one.averages), set(two.averages)) == ({"ema"}, {"ema", "old"})
    assert one.lagging is one.ema
    states = [trainer.lagging.state_dict() for trainer in (one, two)]
    assert states[0]["steps"] == states[1]["steps"] == 3
    weights = [trainer.task.weights.state_dict() for trainer in (one, two)]
    for first, second in (weights, [state["average"] for state in states]):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(states[0]["average"][name], weights[0][name]) for name in weights[0])
    checkpoint = Path("checkpoints") / "iter-000003"
    assert not (tmp_path / "one" / checkpoint / "old.pt").exists()
    # A checkpoint that has the average twice, as runs of an earlier version wrote it, is read as well.
    monkeypatch.undo()
    resumed = trainer_of("diffusion_nft", random_pipeline, tmp_path / "three", *more)
    assert read_checkpoint(tmp_path / "two" / checkpoint, resumed.task.weights, resumed.parts()) == 3
    read = resumed.lagging.state_dict()["average"]
    assert all(torch.equal(read[name], states[1]["average"][name]) for name in read)


def test_the_policy_that_crd_compares_with_is_not_the_policy_that_samples(random_pipeline, tmp_path) -> None:
    """Both lag behind, each by its own rule, and a checkpoint has both."""
    old, compared = "{decay: 0.9, every: 1, rise: 0.9, after: 2}", "{decay: 0.8, every: 1, rise: 0.1, first: 0.7}"
    more = (f"objective.old={old}", f"objective.compared={compared}", "optimizer.learning_rate=0.01")
    trainer = trainer_of("crd", random_pipeline, tmp_path / "run", *more)
    for k in range(2):
        trainer.iterate(k)
    assert set(trainer.parts()) == {"optimizer", "ema", "old", "compared"}
    averages = {name: trainer.averages[name].state_dict()["average"] for name in ("old", "compared")}
    # The first two updates of the average that samples are copies, up to rounding.
    now = trainer.task.weights.state_dict()
    apart = {name: max(float((kept[n] - now[n]).abs().max()) for n in now) for name, kept in averages.items()}
    assert apart["old"] < 1e-7 < 1e-4 < apart["compared"]
    assert trainer.lagging is trainer.averages["old"]
    _, e = trainer.collect(2)
    objective = trainer.objective
    assert isinstance(objective, ForwardObjective)
    batch = next(objective.batches(e, 0, None))
    x = objective._noised(e, batch)[2]
    with torch.no_grad():
        own = objective._velocity(e, batch, x)
        with trainer.averages["compared"].applied():
            lagging = objective._velocity(e, batch, x)
    assert not torch.equal(own, lagging)
    assert torch.equal(objective._old(e, batch, own), lagging)


def test_the_reference_of_a_penalty_may_be_guided(random_pipeline, tmp_path) -> None:
    """Its predictions are those of the base, called with guidance; the policy's own are not guided."""
    more = ("model.reference_call={guidance_scale: 3.0}", "optimizer.learning_rate=0.01")
    trainer = trainer_of("crd", random_pipeline, tmp_path / "run", *more)
    trainer.iterate(0)
    _, e = trainer.collect(1)
    objective, policy = trainer.objective, trainer.task.policy
    assert isinstance(objective, ForwardObjective)
    batch = next(objective.batches(e, 0, None))
    x, own = objective._noised(e, batch)[2], policy.denoiser
    with torch.no_grad(), trainer.task.weights.reference():
        plain = objective._velocity(e, batch, x)
        call = {**own.caller.call, "guidance_scale": 3.0}
        policy.denoiser = Denoiser(own.pipe, num_steps=4, call=call, sigmas=own.sigmas)
        guided = objective._velocity(e, batch, x)
    policy.denoiser = own
    found = objective._reference(e, batch)
    assert torch.equal(found, guided)
    assert not torch.equal(found, plain)
    assert policy.denoiser.caller.call["guidance_scale"] == 1.0


@pytest.mark.parametrize("released", [False, True])
def test_a_guided_reference_of_steps_trains(released, random_pipeline, tmp_path) -> None:
    """The KL is not 0 before the first update, because guidance moves the means of the reference."""
    more = [
        f"model.release_text_encoders={json.dumps(released)}", "penalties=[{name: kl, weight: 0.1}]",
        "run.iterations=1",  # the prompts of all iterations are encoded before the first
    ]  # fmt: skip
    found = {}
    for scale in (1.0, 3.0):
        own = (*more, f"model.reference_call={{guidance_scale: {scale}}}")
        trainer = trainer_of("flow_grpo", random_pipeline, tmp_path / f"{scale}", *own)
        found[scale] = trainer.iterate(0)
    assert found[1.0]["ratio/first_error"] == found[3.0]["ratio/first_error"] == 0.0
    assert found[1.0]["kl"] == 0.0
    assert found[3.0]["kl"] > 1e-4


def test_a_call_of_the_reference_that_does_not_fit_is_refused(random_pipeline, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"model\.reference_call changes the states: .* such as guidance_scale"):
        trainer_of("crd", random_pipeline, tmp_path / "a", "model.reference_call={height: 32, width: 32}")
    with pytest.raises(ValueError, match=r"model\.reference_call\.guidance_scal: .* did you mean 'guidance_scale'"):
        trainer_of("crd", random_pipeline, tmp_path / "b", "model.reference_call={guidance_scal: 2}")


def test_forward_forms_draw_the_levels_they_are_asked_for(random_pipeline, tmp_path) -> None:
    words = ("objective.times=2", "objective.skip=0", "objective.draw=any")
    trainer = trainer_of("awm", random_pipeline, tmp_path / "run", *words)
    seen = set()
    for k in range(4):
        _, e = trainer.collect(k)
        steps = [b.level.step for b in trainer.objective.batches(e, 0, None)]
        assert len(set(steps)) == 2
        assert trainer.objective.rows(e, 0, None) == 2 * 6
        seen |= set(steps)
    assert seen <= {0, 1, 2}
    assert len(seen) == 3


def test_the_noisiest_level_is_left_out_if_the_recipe_says_so(random_pipeline, tmp_path) -> None:
    trainer = trainer_of("awm", random_pipeline, tmp_path / "run")
    _, e = trainer.collect(0)
    assert {b.level.step for b in trainer.objective.batches(e, 0, None)} == {1, 2}
    assert nfe_of(trainer.recipe, forecast(trainer.recipe)).theta == 2
    with pytest.raises(RecipeError, match=r"objective\.skip is 3, and there are 3 noise levels .* use at most 2"):
        load_recipe("awm", ["sampler.steps=4", "objective.skip=3"])
    # A table of levels replaces the number of steps.
    with pytest.raises(RecipeError, match=r"objective\.skip is 4, and there are 3 noise levels .* use at most 2"):
        load_recipe("awm", ["sampler.sigmas=[1.0,0.75,0.5,0.25,0.0]", "objective.skip=4"])
    levels = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0]
    load_recipe("awm", [f"sampler.sigmas={levels}", "sampler.steps=3", "objective.skip=5"])


@pytest.mark.parametrize("noise", ["prompt", "image"])
def test_images_of_a_prompt_share_their_noise_or_have_noise_of_their_own(noise, random_pipeline, tmp_path) -> None:
    trainer = trainer_of("awm", random_pipeline, tmp_path / "run", f"objective.noise={noise}", "objective.times=1")
    _, e = trainer.collect(0)
    objective = trainer.objective
    assert isinstance(objective, ForwardObjective)

    def drawn() -> torch.Tensor:
        return torch.cat([objective._noised(e, batch)[1] for batch in objective.batches(e, 0, None)])

    together = drawn()
    trainer.task.policy.batch = 3
    assert torch.equal(drawn(), together)
    distinct = {tuple(row.flatten().tolist()) for row in together}
    assert len(together) == 6
    assert len(distinct) == (2 if noise == "prompt" else 6)


@pytest.mark.parametrize("noise", ["prompt", "image"])
def test_at_pure_noise_the_images_of_a_prompt_are_one_state(noise, random_pipeline, tmp_path, monkeypatch) -> None:
    words = (f"objective.noise={noise}", "objective.skip=0", "objective.times=null", "objective.draw=any")
    trainer = trainer_of("awm", random_pipeline, tmp_path / "run", *words)
    _, e = trainer.collect(0)
    objective, policy = trainer.objective, trainer.task.policy
    assert isinstance(objective, ForwardObjective)
    evaluated: list[tuple[int, int]] = []
    original = policy.velocity_of

    def counted(prompts):
        def velocity(x, step, rows):
            evaluated.append((step, len(x)))
            return original(prompts)(x, step, rows)

        return velocity

    monkeypatch.setattr(policy, "velocity_of", counted)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    found, outcomes = gradient(trainer, e, advantages)
    # Two prompts of three images.
    first = 2 if noise == "prompt" else 6
    assert set(evaluated) == {(0, first), (1, 6), (2, 6)}
    assert e.plan.sigmas[0] == 1.0
    assert all(float(outcome.error) == 0.0 for outcome in outcomes)

    monkeypatch.setattr(objective, "_one_state", lambda level: False)
    each, _ = gradient(trainer, e, advantages)
    for name in found:
        torch.testing.assert_close(found[name], each[name], rtol=1e-3, atol=1e-7)


def test_what_is_not_kept_has_no_gradient_and_no_share(random_pipeline, tmp_path) -> None:
    trainer = trainer_of("mixgrpo", random_pipeline, tmp_path / "run")
    _, e = trainer.collect(0)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    keep = torch.zeros(len(e.rollout.parent), dtype=torch.bool)
    chosen = e.rollout.transitions[1].node[1::2]
    keep[chosen] = True
    assert trainer.objective.rows(e, 0, keep) == len(chosen)
    assert {t.step for t, _ in trainer.objective.batches(e, 0, keep)} == {e.rollout.transitions[1].step}
    found, outcomes = gradient(trainer, e, advantages, keep)
    # The same as training only those edges, divided by their number; the others have no advantage.
    alone, _ = gradient(trainer, e, torch.where(keep, advantages, 0.0))
    share = len(chosen) / trainer.objective.rows(e, 0, None)
    for n in found:
        torch.testing.assert_close(alone[n], share * found[n], rtol=1e-3, atol=1e-9)
    assert float(sum(o.statistics[..., 0].sum() for o in outcomes)) == len(chosen)


def test_the_mask_of_dppo_drops_what_moved_too_far_and_moves_on(random_pipeline, tmp_path) -> None:
    trainer = trainer_of("flow_dppo", random_pipeline, tmp_path / "run")
    objective = trainer.objective
    assert isinstance(objective, TransitionObjective)
    limit = trainer.recipe.objective["trust_nats"] / trainer.task.elements
    log_ratio = torch.tensor([[0.1], [0.1], [-0.1], [-0.1], [0.1]])
    advantage = torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [1.0]])
    divergence = torch.tensor([[2.0], [2.0], [2.0], [2.0], [0.5]]) * limit
    assert objective._trusted(log_ratio, advantage, divergence).flatten().tolist() == [0, 1, 1, 0, 1]


def test_an_anchor_moves_and_is_what_the_kl_compares_with(random_pipeline, tmp_path) -> None:
    more = ("reference={decay: 0.0, every: 2}", "optimizer.learning_rate=0.01", "optimizer.epochs=1")
    trainer = trainer_of("sage_grpo", random_pipeline, tmp_path / "run", *more)
    kl = [trainer.iterate(k)["kl"] for k in range(4)]
    # Policy and anchor are equal before the first and after every second update, and one update apart in between.
    assert kl[0] < 1e-10
    assert kl[1] > 100 * kl[2]
    assert kl[3] > 100 * kl[2]


def test_updates_by_edges_share_out_every_trained_edge_once(random_pipeline, tmp_path) -> None:
    more = ("rollout.batch=2", "optimizer.cut=edges", "optimizer.updates=4", "optimizer.learning_rate=0.01")
    trainer = trainer_of("dance_grpo", random_pipeline, tmp_path / "run", *more)
    _, e = trainer.collect(0)
    parts = [[(t.step, b.start) for t, b in e.batches(k)] for k in range(4)]
    nodes = [t.node[t.edges_of(b)] for k in range(4) for t, b in e.batches(k)]
    assert torch.cat(nodes).sort().values.equal(torch.cat([t.node for t in e.rollout.transitions]).sort().values)
    # Two prompts of three images make three batches of six states at two steps, and one batch at the first step.
    assert sorted(len(part) for part in parts) == [1, 2, 2, 2]
    assert any(len({step for step, _ in part}) > 1 for part in parts)
    record = trainer.update(e, torch.linspace(-1, 1, len(e.rollout.parent)))
    assert record["ratio/first_error"] == 0.0
    assert record["log_ratio_sq"] > 0.0


@pytest.mark.parametrize("updates", [1, 2])
def test_anchors_are_some_samples_of_every_group_and_step(updates, random_pipeline, tmp_path) -> None:
    more = ("objective.anchors=2", f"optimizer.updates={updates}", "optimizer.learning_rate=0.01")
    trainer = trainer_of("neighbor_grpo", random_pipeline, tmp_path / "run", *more)
    _, e = trainer.collect(0)
    drawn = [
        (t.step, t.prompt[k]) for u in range(updates) for t, own in trainer.objective.batches(e, u, None) for k in own
    ]
    assert sorted(drawn) == sorted(
        (step, prompt) for step in e.plan.trained_steps for prompt in (0, 1) for _ in range(2)
    )
    again = [(t.step, own.tolist()) for t, own in trainer.objective.batches(e, 0, None)]
    assert again == [(t.step, own.tolist()) for t, own in trainer.objective.batches(e, 0, None)]
    record = trainer.update(e, torch.linspace(-1, 1, len(e.rollout.parent)))
    assert record["ratio/first_error"] == 0.0
    assert (record["log_ratio_sq"] > 0.0) == (updates > 1)


@pytest.mark.parametrize(("old", "acts"), [("{decay: 0.3, every: 1}", True), ("null", False)])
def test_the_clip_of_dgpo_acts_because_its_old_policy_lags(old, acts, random_pipeline, tmp_path) -> None:
    trainer = trainer_of(
        "dgpo", random_pipeline, tmp_path / "run", f"objective.old={old}", "optimizer.learning_rate=0.05"
    )
    shares = []
    for iteration in range(3):
        _, e = trainer.collect(iteration)
        record = trainer.update(e, torch.linspace(-1, 1, len(e.rollout.parent)))
        shares += [step["clip_share"] for step in record["steps"].values()]
    assert (max(shares) > 0) == acts


def test_levels_are_drawn_without_the_last_and_without_what_is_skipped() -> None:
    assert levels_to_draw(10) == range(9)
    assert levels_to_draw(10, levels=5) == range(5)
    assert levels_to_draw(10, levels=20, skip=1) == range(1, 9)
    generator = torch.Generator().manual_seed(0)
    assert draw_steps(range(1, 9), None, "any", generator) == draw_steps(range(1, 9), 8, "ranges", generator)
    for draw in ("any", "ranges"):
        drawn = [draw_steps(range(2, 9), 3, draw, torch.Generator().manual_seed(seed)) for seed in range(300)]
        assert all(steps == sorted(set(steps)) and len(steps) == 3 for steps in drawn)
        assert {step for steps in drawn for step in steps} == set(range(2, 9))
    assert all(steps[0] < 4 <= steps[1] < 6 <= steps[2] for steps in drawn)
