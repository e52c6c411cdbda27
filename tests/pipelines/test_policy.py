"""The policy of real pipelines at toy size: ratios, gradients, penalties and weights of steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.core.penalties import PENALTIES
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.experience import Experience
from flowgrpo.pipelines.pipeline_error import PipelineError
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.pipelines.prompt_cache import PromptCache
from flowgrpo.pipelines.scored_edges import ScoredEdges
from flowgrpo.samplers.kernels import KERNELS, Kernel, guard_weight
from flowgrpo.samplers.plans import Plan, branch_plan, spine_plan, window_plan
from flowgrpo.samplers.transitions import Transitions
from flowgrpo.training.losses.edges import edges_of
from flowgrpo.weights.precision import cast_base
from flowgrpo.weights.trained import LoraSpec, TrainedWeights
from tests.pipelines.trained import perturb
from tests.tiny_pipelines import CALL, TINY

KEYS = tuple(TINY)
STEPS = 4
PROMPTS = ("a photo of two red circles", "a star", "three blue squares above a star")
STOCHASTIC = [name for name in KERNELS if name != "ode"]
FLOW = Kernel("flow_sde", 0.7)

# The text stream of the last joint block ends unread: its output projection is computed with and dropped (SD3
# leaves it out), and its queries only ask for what is dropped.
_LAST = "transformer.transformer_blocks.1.attn"
NO_GRADIENT: dict[str, set[str]] = {
    "sd3": {f"{_LAST}.add_q_proj"},
    "qwenimage": {f"{_LAST}.add_q_proj", f"{_LAST}.to_add_out"},
}


TABLE = (1.0, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0.0)


@functools.cache
def tiny_policy(key: str, dtype: torch.dtype = torch.float32) -> FlowPolicy:
    """A policy whose adapter has moved off its start."""
    pipe = TINY[key]()
    cast_base(pipe, dtype)
    weights = TrainedWeights.lora(pipe, LoraSpec(rank=2, alpha=4), seed=0)
    PromptCache(pipe, CALL[key])
    perturb(weights)
    return FlowPolicy(Denoiser(pipe, num_steps=STEPS, call=CALL[key], variant="direct"), weights)


@contextmanager
def settings(policy: FlowPolicy, **values: Any) -> Iterator[FlowPolicy]:
    """The policy with other settings; afterwards its weights are the same again, whatever changed them."""
    before, state = {name: getattr(policy, name) for name in values}, policy.weights.state_dict()
    try:
        for name, value in values.items():
            setattr(policy, name, value)
        yield policy
    finally:
        policy.weights.load_state_dict(state)
        clear(policy)
        for name, value in before.items():
            setattr(policy, name, value)


def clear(policy: FlowPolicy) -> None:
    for parameter in policy.weights.parameters():
        parameter.grad = None


def nudge(policy: FlowPolicy, size: float, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    policy.weights.write()


def experience_of(policy: FlowPolicy, plan: Plan, prompts: tuple[str, ...] = PROMPTS, updates: int = 1) -> Experience:
    rollout = policy.sample(prompts, [100 + k for k in range(len(prompts))], plan, updates)
    return Experience(rollout, plan, prompts, torch.zeros(len(rollout.leaf), 3, 1, 1), updates)


def scores(policy: FlowPolicy, experience: Experience) -> list[tuple[Transitions, slice, ScoredEdges]]:
    parts = [part for k in range(experience.updates) for part in experience.batches(k)]
    return [(t, rows, policy.score(experience, t, rows)) for t, rows in parts]


def window(policy: FlowPolicy, kernel: Kernel = FLOW, steps: Any = range(STEPS - 1), samples: int = 2) -> Plan:
    return window_plan(policy.denoiser.probe.sigmas, steps, kernel, samples=samples)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratio_is_exactly_one_until_the_weights_move(key: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(key, dtype)
    edges = 0
    for name in STOCHASTIC:
        experience = experience_of(policy, window(policy, Kernel(name)), PROMPTS[:2])
        for form in ("gaussian", "guard", *(["cps_released"] if name == "cps" else [])):
            with settings(policy, ratio=form):
                for t, _, scored in scores(policy, experience):
                    assert t.x.dtype == policy.denoiser.probe.dtype
                    # Sana's pipeline predicts in float32, whatever the dtype of its weights.
                    assert t.velocity.dtype == (torch.float32 if key == "sana" else dtype)
                    assert scored.log_ratio.requires_grad
                    assert torch.equal(scored.log_ratio, torch.zeros(len(scored.node), 1))
                    edges += len(scored.node)

    assert edges == (2 * len(STOCHASTIC) + 1) * 2 * 2 * (STEPS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["branch", "spine", "solver"])
@pytest.mark.parametrize("key", ["sd3", "wan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ratio_is_exactly_one_for_every_plan_and_batch(make: str, key: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(key, dtype)
    sigmas = policy.denoiser.probe.sigmas
    plan = {
        "branch": branch_plan(sigmas, (0, 1), FLOW, width=2, spread=4.0),
        "spine": spine_plan(sigmas, (0, 2), FLOW, branches=2, solver="dpmpp_2m"),
        "solver": window_plan(sigmas, (1, 2), FLOW, samples=3, solver="dpmpp_2m", shared_noise=False),
    }[make]
    with settings(policy, ratio="gaussian", batch=3):
        experience = experience_of(policy, plan, updates=2)
        scored = [s for _, _, s in scores(policy, experience)]

    assert sum(len(s.node) for s in scored) == 3 * plan.counts().trained_edges
    assert all((s.log_ratio == 0).all() for s in scored)


@pytest.mark.slow
def test_a_step_is_scored_on_the_table_it_was_sampled_on() -> None:
    policy = tiny_policy("sd3")
    other = window_plan((0.9, 0.6, 0.3, 0.0), (0, 1), FLOW, samples=2)
    first = experience_of(policy, other, PROMPTS[:1])
    second = experience_of(policy, window(policy), PROMPTS[:1])

    for experience in (first, second, first):
        assert all((s.log_ratio == 0).all() for _, _, s in scores(policy, experience))
        assert policy.denoiser.sigmas == experience.plan.sigmas


def exact_log_ratios(t: Transitions, rows: slice, new: Tensor) -> dict[str, Tensor]:
    """[E] each from the two densities, in float64."""
    edges = t.edges_of(rows)
    start, c = t.state[edges], t.coefficients
    x, x_next = t.x[start].double(), t.x_next[edges].double()

    def mean(v: Tensor) -> Tensor:
        return (1 - c.sigma_next) * (x - c.sigma * v) + c.kappa * (x + (1 - c.sigma) * v)

    before, after = mean(t.velocity[start].double()), mean(new[start - rows.start].double())
    normal = [torch.distributions.Normal(m, c.std).log_prob(x_next).flatten(1).mean(1) for m in (after, before)]
    squares = [((x_next - m) ** 2).flatten(1).mean(1) for m in (after, before)]
    shift = ((x_next - before) / c.std * (after - before)).flatten(1).mean(1)
    return {"gaussian": normal[0] - normal[1], "guard": shift, "cps_released": squares[1] - squares[0]}


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["gaussian", "guard", "cps_released"])
def test_log_ratio_is_the_difference_of_the_densities(key: str, form: str) -> None:
    policy = tiny_policy(key)
    kernel = Kernel("cps", 0.6) if form == "cps_released" else FLOW
    experience = experience_of(policy, window(policy, kernel, samples=3), PROMPTS[:2])
    with settings(policy, ratio=form):
        nudge(policy, 0.02)
        for t, rows, scored in scores(policy, experience):
            texts = [experience.prompts[p] for p in t.prompt[rows]]
            with torch.no_grad():
                new = policy.denoiser.velocity(t.x[rows], t.step, texts)
            expected = exact_log_ratios(t, rows, new)[form]
            scale = expected.abs().max().item()
            assert scale > 1e-6
            torch.testing.assert_close(scored.log_ratio[:, 0].double(), expected, rtol=1e-3, atol=2e-3 * scale)
            assert torch.equal(scored.node, t.node[t.edges_of(rows)])
            assert scored.steps.tolist() == [[t.step]] * len(scored.node)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gaussian", "guard"])
def test_slope_of_the_log_ratio_along_the_weights(form: str) -> None:
    """Central differences of the log-ratio against its gradient at the sampling policy."""
    policy = tiny_policy("sd3")
    experience = experience_of(policy, window(policy, steps=(1,), samples=3), PROMPTS[:2])
    (transitions, rows), *_ = experience.batches(0)
    with settings(policy, ratio=form):
        policy.score(experience, transitions, rows).log_ratio[:2].sum().backward()
        generator = torch.Generator().manual_seed(1)
        slope = sum((torch.randn(p.shape, generator=generator) * p.grad).sum() for p in policy.weights.parameters())
        values = []
        for step in (3e-3, -6e-3):
            nudge(policy, step)
            with torch.no_grad():
                values.append(policy.score(experience, transitions, rows).log_ratio[:2].sum())

    assert isinstance(slope, Tensor)
    torch.testing.assert_close((values[0] - values[1]) / 6e-3, slope, rtol=2e-2, atol=1e-5)


def gradients(policy: FlowPolicy, experience: Experience) -> dict[str, Tensor]:
    """Gradient of the sum over all trained edges, each with a different weight; the policy's weights do not change."""
    clear(policy)
    for _, _, scored in scores(policy, experience):
        (scored.log_ratio[:, 0] * torch.cos(scored.node.float())).sum().backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in policy.weights.named_parameters().items()
    }
    clear(policy)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_reaches_every_trained_parameter_in_use(key: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(key, dtype)
    found = gradients(policy, experience_of(policy, window(policy), PROMPTS[:2]))
    without = {name.rpartition(".lora_")[0] for name, grad in found.items() if not grad.any()}

    assert without == NO_GRADIENT.get(key, set())
    assert len(found) >= 8
    assert all(grad.isfinite().all() for grad in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_rollouts_and_gradients_do_not_depend_on_the_batch(key: str) -> None:
    policy = tiny_policy(key)
    plan = window(policy, steps=(1, 2))
    results = []
    for batch, updates in ((64, 1), (4, 1), (1, 1), (64, 3)):
        with settings(policy, batch=batch, ratio="gaussian"):
            experience = experience_of(policy, plan, updates=updates)
            results.append((experience.rollout, gradients(policy, experience)))

    rollout, expected = results[0]
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert largest > 1e-3
    for other, found in results[1:]:
        assert torch.equal(other.parent, rollout.parent)
        assert torch.equal(other.transitions[0].state, rollout.transitions[0].state)
        torch.testing.assert_close(other.x, rollout.x, rtol=1e-4, atol=1e-4)
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-4 * largest)


@pytest.mark.slow
def test_each_part_is_the_trained_edges_of_its_prompts() -> None:
    policy = tiny_policy("flux")
    experience = experience_of(policy, window(policy, samples=3), updates=2)
    nodes = []
    for k, prompts in enumerate(({0}, {1, 2})):
        parts = list(experience.batches(k))
        assert {p for t, rows in parts for p in t.prompt[rows]} == prompts
        edges = sum(len(t.node[t.edges_of(b)]) for t, b in experience.batches(k))
        assert edges == len(prompts) * experience.plan.counts().trained_edges
        nodes += [node for t, rows in parts for node in t.node[t.edges_of(rows)].tolist()]

    assert sorted(nodes) == sorted(n for t in experience.rollout.transitions for n in t.node.tolist())


def penalty(name: str, scored: ScoredEdges) -> Tensor:
    """[E] a penalty of the package for each edge; the advantages do not matter."""
    return PENALTIES[name](edges_of(scored, 0, torch.zeros(len(scored.node)), None))


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_penalty_is_the_kl_to_the_pipeline_without_its_adapter(key: str) -> None:
    policy = tiny_policy(key)
    with settings(policy):
        experience = experience_of(policy, window(policy, steps=(0, 2)), PROMPTS[:2])
        for t, rows, scored in scores(policy, experience):
            texts = [experience.prompts[p] for p in t.prompt[rows]]
            with torch.no_grad(), policy.weights.reference():
                v = policy.denoiser.velocity(t.x[rows], t.step, texts)
            exact = exact_kl(t, t.velocity[rows].double() - v.double())
            expected = exact[t.state[t.edges_of(rows)] - rows.start]
            assert expected.min() > 1e-6
            found = penalty("kl", scored)
            torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)
            found.sum().backward()
        assert any(p.grad is not None and p.grad.any() for p in policy.weights.parameters())

        clear(policy)
        with torch.no_grad():
            for name, parameter in policy.weights.named_parameters().items():
                if ".lora_B" in name:
                    parameter.zero_()
        for _, _, scored in scores(policy, experience):
            found = penalty("kl", scored)
            assert torch.equal(found, torch.zeros_like(found))
            assert (scored.log_ratio != 0).all()
            found.sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in policy.weights.parameters())


def exact_kl(t: Transitions, difference: Tensor) -> Tensor:
    """[S] mean(Δμ²) / 2s² with Δμ = (∂μ/∂v) Δv."""
    c = t.coefficients
    slope = -(1 - c.sigma_next) * c.sigma + c.kappa * (1 - c.sigma)
    return (slope * difference).square().flatten(1).mean(1) / (2 * c.std**2)


@pytest.mark.slow
def test_the_reference_is_evaluated_where_a_penalty_asks_for_it() -> None:
    policy = tiny_policy("sd3")
    with settings(policy, reference=functools.partial(pytest.fail, "nothing compares with the reference")):
        experience = experience_of(policy, window(policy, steps=(0,)), PROMPTS[:1])
        for _, _, scored in scores(policy, experience):
            assert penalty("stepwise", scored).shape == scored.node.shape


@pytest.mark.slow
def test_penalties_of_a_moved_policy_in_closed_form() -> None:
    """Stepwise is the KL to the sampling policy, w2 the KL to the base times 2 s²; a guide's step costs its own KL."""
    policy = tiny_policy("sd3")

    def guide(x: Tensor, v: Tensor, i: int, rows: Any) -> Tensor:
        return torch.full_like(x, 0.2)

    with settings(policy):
        plan = window(policy, steps=(0, 1))
        keys = [100]
        rollout = policy.sample(PROMPTS[:1], keys, plan, guide=guide)
        experience = Experience(rollout, plan, PROMPTS[:1], torch.zeros(len(rollout.leaf), 3, 1, 1), 1)
        for _, _, scored in scores(policy, experience):
            still = torch.zeros(len(scored.node))
            assert torch.equal(penalty("stepwise", scored), still)
            # At rest the guided step is 0.2 s away at every element.
            torch.testing.assert_close(penalty("distil", scored), still + 0.2**2 / 2)
            assert torch.equal(scored.divergence, torch.zeros_like(scored.log_ratio))
        nudge(policy, 0.01)
        for t, rows, scored in scores(policy, experience):
            texts = [experience.prompts[p] for p in t.prompt[rows]]
            with torch.no_grad():
                moved = policy.denoiser.velocity(t.x[rows], t.step, texts)
            exact = exact_kl(t, t.velocity[rows].double() - moved.double())[t.state[t.edges_of(rows)] - rows.start]
            torch.testing.assert_close(penalty("stepwise", scored).double(), exact, rtol=1e-3, atol=1e-9)
            torch.testing.assert_close(scored.divergence.double()[:, 0], exact, rtol=1e-3, atol=1e-9)
            torch.testing.assert_close(penalty("w2", scored), penalty("kl", scored) * 2 * t.coefficients.std**2)
            for name in ("w2", "stepwise", "distil"):
                assert penalty(name, scored).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "flow_sde", "dance_sde"])
def test_equalised_weights_make_the_gradient_of_a_plain_ratio_even(name: str) -> None:
    policy = tiny_policy("sd3")
    plan = window_plan(TABLE, range(9), Kernel(name, 0.7), samples=2)
    with settings(policy, weight="equalise"):
        scales = []
        for i in range(9):
            c = plan.trained_coefficients(i)
            scales.append(policy.step_weight(plan, i, c) / (guard_weight(c) * c.std))
        assert max(scales) / min(scales) == pytest.approx(1.0, rel=1e-9)
        weights = sorted(policy.step_weight(plan, i, plan.trained_coefficients(i)) for i in range(9))
        assert weights[4] == pytest.approx(1.0, rel=1e-9)


@pytest.mark.slow
def test_rectified_weights_of_windows_of_one_step_average_one_over_the_steps_they_are_drawn_from() -> None:
    """The weight is s/|J|: 1 / (√Δ / g + g √Δ (1 - σ) / (2 σ)) with s = g √Δ, as the release writes it."""
    policy = tiny_policy("sd3")
    kernel, pool = Kernel("wan_sde", 1.0), range(1, 6)
    with settings(policy, weight="rectify", pool=pool):
        found = []
        for i in pool:
            plan = window_plan(TABLE, [i], kernel, samples=2)
            found.append(policy.step_weight(plan, i, plan.trained_coefficients(i)))
    released = []
    for i in pool:
        sigma, delta = TABLE[i], TABLE[i] - TABLE[i + 1]
        g = TABLE[-1] + (TABLE[1] - TABLE[-1]) * sigma
        released.append(1 / (delta**0.5 / g + g * delta**0.5 * (1 - sigma) / (2 * sigma)))
    assert found == pytest.approx([one * len(pool) / sum(released) for one in released], rel=1e-9)
    assert sum(found) / len(found) == pytest.approx(1.0)
    with settings(policy, weight="rectify", pool=None):
        plan = spine_plan(TABLE, range(9), FLOW, branches=2)
        weights = [policy.step_weight(plan, i, plan.trained_coefficients(i)) for i in range(9)]
    assert sum(weights) / 9 == pytest.approx(1.0)
    assert len({round(weight, 6) for weight in weights}) > 1


@pytest.mark.slow
def test_noise_weights_average_one_and_are_those_of_tempflow() -> None:
    """TempFlow-GRPO's constant for ten steps shifted by three, eta 0.7, nine steps, is 2.252 (2.25 in its code)."""
    policy = tiny_policy("sd3")
    spine = spine_plan(TABLE, range(9), FLOW, branches=2)
    chain = window_plan(TABLE, range(9), FLOW, samples=2)
    with settings(policy, weight="noise"):
        for plan, which in ((spine, 1), (chain, 0)):
            found = [c for c in (plan.coefficients(i)[which] for i in range(9)) if c is not None]
            weights = [policy.step_weight(plan, i, c) for i, c in enumerate(found)]
            assert sum(weights) / 9 == pytest.approx(1.0, rel=1e-12)
            assert weights[3] / found[3].std == pytest.approx(2.252, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["none", "guard", "noise"])
def test_edges_carry_the_weight_of_their_step(weight: str) -> None:
    policy = tiny_policy("sana")
    plan = window(policy, Kernel("dance_sde", 0.4), steps=(0, 2))
    with settings(policy, weight=weight):
        for t, _, scored in scores(policy, experience_of(policy, plan, PROMPTS[:1])):
            c = t.coefficients
            mean = sum(plan.coefficients(i)[0].std for i in (0, 2)) / 2
            expected = {"none": 1.0, "guard": guard_weight(c), "noise": c.std / mean}[weight]
            torch.testing.assert_close(scored.weight, torch.full((len(scored.node), 1), expected))
            assert not scored.weight.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("key", ["sd3", "wan"])
def test_leaves_are_decoded_with_their_own_prompts(key: str) -> None:
    policy = tiny_policy(key)
    experience = experience_of(policy, window(policy, steps=(0,)), PROMPTS[:2])
    seen: list[tuple[Tensor, list[str]]] = []
    decode = policy.denoiser.decode

    def record(x: Tensor, prompts: list[str]) -> Tensor:
        seen.append((x, prompts))
        return decode(x, prompts)

    policy.denoiser.decode = record  # type: ignore[method-assign, assignment]
    try:
        with settings(policy, decode_batch=3):
            images = policy.decode(experience.rollout, PROMPTS[:2])
    finally:
        del policy.denoiser.decode

    assert experience.prompt_of_sample == [0, 0, 1, 1]
    assert [prompts for _, prompts in seen] == [[PROMPTS[0], PROMPTS[0], PROMPTS[1]], [PROMPTS[1]]]
    assert torch.equal(torch.cat([x for x, _ in seen]), experience.rollout.x)
    assert images.shape[0] == 4
    assert images.ndim == (5 if key == "wan" else 4)
    assert 0 <= images.min() < images.max() <= 1
    torch.testing.assert_close(images, policy.decode(experience.rollout, PROMPTS[:2]), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_samples_that_have_overflowed_reach_no_reward() -> None:
    policy = tiny_policy("sd3")
    rollout = experience_of(policy, window(policy, steps=(0,)), PROMPTS[:2]).rollout
    x = rollout.x.clone()
    x[1, 0, 0, 0] = math.nan

    with pytest.raises(PipelineError, match=r"the decoded images are not finite in 1 of 4 samples.*model.dtype"):
        policy.decode(replace(rollout, x=x), PROMPTS[:2])
    with pytest.raises(PipelineError, match=r"steps are not finite in 1 of 4 samples.*optimizer.learning_rate"):
        policy.denoiser.velocity(x, 1, [PROMPTS[0]] * 4)


@pytest.mark.slow
def test_a_rollout_tells_how_many_of_its_states_are_evaluated() -> None:
    policy = tiny_policy("sd3")
    plan = replace(window(policy, steps=(0, 1), samples=3), roots=2)
    told: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        told.append((done, total))

    keys = list(range(len(PROMPTS)))
    with settings(policy, batch=5, decode_batch=4):
        whole = policy.sample(PROMPTS, keys, plan, told=note)
        counts = [done for done, _ in told]
        assert {total for _, total in told} == {whole.evaluations}
        assert all(0 < after - before <= 5 for before, after in zip([0, *counts], counts))
        assert counts[-1] == whole.evaluations
        told.clear()
        first, last = slice(0, 1), slice(1, len(PROMPTS))
        parts = [policy.sample(PROMPTS, keys, plan, chunk=chunk, told=note) for chunk in (first, last)]
        assert told[-1] == (whole.evaluations, whole.evaluations)
        assert (parts[0].evaluations, whole.evaluations) in told
        told.clear()
        leaves = len(policy.decode(whole, PROMPTS, note))
    assert told == [(min(k + 4, leaves), leaves) for k in range(0, leaves, 4)]


@pytest.mark.slow
def test_the_layout_is_settled_before_the_first_noise_is_drawn() -> None:
    """Only the self-check sees a state in the loop; before it the probe may have seen another tensor."""
    pipe = TINY["sd3"]()
    denoiser = Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"])
    shape = denoiser.probe.latent_shape
    denoiser.probe = replace(denoiser.probe, latent_shape=(1,), dtype=torch.float64)
    policy = FlowPolicy(denoiser, TrainedWeights.lora(pipe, LoraSpec(rank=2, alpha=4), seed=0))
    rollout = policy.sample(PROMPTS[:1], [1], window(policy, steps=(0,)))

    assert denoiser.variant == "direct"
    assert rollout.x.shape == (2, *shape)
    assert rollout.x.dtype == torch.float32
