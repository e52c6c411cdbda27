"""Estimates of the log-prob of a completion under a masked model: masks, weights, and what they estimate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flowgrpo.core.likelihoods import (
    LIKELIHOODS,
    Passes,
    blocks,
    coupled,
    elbo,
    fully_masked,
    gauss_legendre,
    quadrature,
    trace,
    uniform,
    upper_bound,
)  # fmt: skip

LENGTH, VOCABULARY = 3, 4


def drawn(likelihood: Callable[..., Passes], seed: int, **options: object) -> Passes:
    return likelihood(LENGTH, torch.Generator().manual_seed(seed), **options)


def log_p(masked: Tensor, ids: Tensor) -> Tensor:
    """[L] log-probs of the tokens of a model in which tokens depend on all tokens that are not masked."""
    table = torch.randn(LENGTH, LENGTH, VOCABULARY + 1, VOCABULARY, generator=torch.Generator().manual_seed(3)).double()
    seen = torch.where(masked, VOCABULARY, ids)
    logits = sum(table[:, place, seen[place]] for place in range(LENGTH))
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def estimate(passes: Passes, ids: Tensor) -> float:
    return float(sum((w * log_p(m, ids) * m).sum() for m, w in zip(passes.masked, passes.weight.double())))


def every_mask() -> list[Tensor]:
    return [torch.tensor(row) for row in itertools.product((False, True), repeat=LENGTH)]


IDS = torch.tensor([1, 3, 0])


def test_a_pair_scores_every_position_exactly_once() -> None:
    for seed in range(20):
        passes = drawn(coupled, seed, pairs=3, whole=False)
        times = passes.masked.view(3, 2, LENGTH).sum(1)
        assert torch.equal(times, torch.ones(3, LENGTH, dtype=times.dtype))
        assert torch.allclose(passes.weight.sum(0), torch.ones(LENGTH))
        whole = drawn(coupled, seed, pairs=3)
        assert bool(whole.masked[0].all())
        assert torch.allclose(whole.weight.sum(0), torch.ones(LENGTH))


def test_the_mean_over_pairs_is_the_enumerated_expectation() -> None:
    """A mask of k positions has the chance B(k + 1, L - k + 1) over a uniform level, as has its complement."""
    wanted = 0.0
    for masked in every_mask():
        k = int(masked.sum())
        chance = 1 / ((LENGTH + 1) * math.comb(LENGTH, k))
        both = (log_p(masked, IDS) * masked).sum() + (log_p(~masked, IDS) * ~masked).sum()
        wanted += chance * float(both)
    found = torch.tensor(
        [estimate(drawn(coupled, seed, whole=False), IDS) for seed in range(3000)], dtype=torch.float64
    )
    assert found.mean() == pytest.approx(wanted, abs=4 * float(found.std()) / math.sqrt(len(found)))
    assert found.std() > 0.01


def test_coupled_masks_vary_less_than_independent_ones() -> None:
    def independent(seed: int) -> float:
        """Two masks at levels t and 1 - t that are drawn by themselves; the same expectation as a pair."""
        generator = torch.Generator().manual_seed(seed)
        level = torch.rand(1, generator=generator).double()
        total = 0.0
        for one in (level, 1 - level):
            masked = torch.rand(LENGTH, generator=generator).double() < one
            total += float((log_p(masked, IDS) * masked).sum())
        return total

    pairs = torch.tensor([estimate(drawn(coupled, seed, whole=False), IDS) for seed in range(1500)])
    others = torch.tensor([independent(seed) for seed in range(1500)])
    assert abs(pairs.mean() - others.mean()) < 4 * (pairs.var() + others.var()).sqrt() / math.sqrt(1500)
    assert pairs.var() < 0.5 * others.var()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_quadrature_is_exact_for_polynomials_of_its_degree(count: int) -> None:
    nodes, weights = gauss_legendre(count)
    assert list(nodes) == sorted(nodes)
    assert 0 < nodes[0] <= nodes[-1] < 1
    for power in range(2 * count):
        assert sum(w * x**power for x, w in zip(nodes, weights)) == pytest.approx(1 / (power + 1), abs=1e-12)
    wrong = sum(w * x ** (2 * count) for x, w in zip(nodes, weights))
    assert abs(wrong - 1 / (2 * count + 1)) > 1e-6


def test_the_quadrature_estimates_the_evidence_lower_bound() -> None:
    """The integrand is a polynomial of degree 2 in t here, so two nodes integrate it exactly."""
    found = torch.tensor(
        [estimate(drawn(quadrature, seed, levels=2), IDS) for seed in range(6000)], dtype=torch.float64
    )
    assert found.mean() == pytest.approx(enumerated_bound(), abs=4 * float(found.std()) / math.sqrt(len(found)))
    more = torch.tensor([estimate(drawn(quadrature, seed, levels=2, draws=4), IDS) for seed in range(1000)])
    assert more.var() < 0.5 * found.var()


def enumerated_bound() -> float:
    """The bound by enumeration: a mask of k positions adds B(k, L - k + 1), the integral of t^(k-1) (1 - t)^(L-k)."""
    bound = 0.0
    for masked in every_mask():
        if k := int(masked.sum()):
            share = math.gamma(k) * math.gamma(LENGTH - k + 1) / math.gamma(LENGTH + 1)
            bound += share * float((log_p(masked, IDS) * masked).sum())
    return bound


@pytest.mark.parametrize("ranges", [True, False])
def test_random_numbers_of_masks_estimate_the_evidence_lower_bound(ranges: bool) -> None:
    found = torch.tensor(
        [estimate(drawn(elbo, seed, levels=2, ranges=ranges), IDS) for seed in range(6000)], dtype=torch.float64
    )
    assert found.mean() == pytest.approx(enumerated_bound(), abs=4 * float(found.std()) / math.sqrt(len(found)))


def test_each_pass_masks_as_many_positions_as_its_weight_says() -> None:
    counts = []
    for seed in range(400):
        passes = elbo(16, torch.Generator().manual_seed(seed), levels=4)
        count = passes.masked.sum(1)
        assert torch.allclose(passes.weight.sum(1), torch.full((4,), 16 / 4))
        assert bool(((passes.weight > 0) == passes.masked).all())
        # One number of masks in each quarter of 1 to 16.
        assert ((count - 1) // 4).tolist() == [0, 1, 2, 3]
        counts += count.tolist()
    assert set(counts) == set(range(1, 17))


def test_levels_of_ranges_vary_less_than_independent_ones() -> None:
    """Of a model whose tokens are less likely the fewer it sees, on 256 positions."""

    def spread(ranges: bool) -> float:
        made = [elbo(256, torch.Generator().manual_seed(seed), levels=8, ranges=ranges) for seed in range(300)]
        return float(torch.tensor([(p.weight.sum(1) * p.masked.sum(1) / 256).sum() for p in made]).var())

    assert spread(True) < 0.05 * spread(False)


def test_one_pass_masks_everything() -> None:
    passes = drawn(fully_masked, 0, prompt=0.3)
    assert passes.masked.tolist() == [[True] * LENGTH]
    assert passes.weight.tolist() == [[1.0] * LENGTH]
    assert passes.prompt == 0.3


def test_what_uniform_levels_never_mask_does_not_count() -> None:
    seen = set()
    for seed in range(200):
        passes = drawn(uniform, seed, draws=2)
        assert torch.equal(passes.counted, passes.masked.any(0))
        assert torch.allclose(passes.weight.sum(0), passes.counted.float())
        seen.add(int(passes.counted.sum()))
    assert seen == set(range(LENGTH + 1))


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "trace"])
def test_masks_follow_from_their_generator(name: str) -> None:
    given = {"written": torch.ones(LENGTH, dtype=torch.bool)} if name == "blocks" else {}
    one, same, other = (drawn(LIKELIHOODS[name], seed, **given) for seed in (5, 5, 6))
    assert torch.equal(one.masked, same.masked)
    assert one.masked.shape == other.masked.shape
    assert bool((one.weight[~one.masked] == 0).all())


def traced(steps: list[int], block: int | None, shrink: int = 1) -> tuple[list[list[int]], list[list[float]]]:
    found = trace(len(steps), torch.Generator(), steps=torch.tensor(steps), block=block, shrink=shrink)
    assert found.apart
    assert bool(found.counted.all())
    return found.masked.int().tolist(), found.weight.tolist()


def test_a_trace_masks_what_was_masked_before_its_steps_and_scores_what_they_revealed() -> None:
    masked, scored = traced([2, 0, 1, 0], None)
    assert masked == [[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]]
    assert scored == [[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]
    # Two steps in a pass: the first pass has the steps 0 and 1.
    assert traced([2, 0, 1, 0], None, shrink=2) == ([[1, 1, 1, 1], [1, 0, 0, 0]], [[0, 1, 1, 1], [1, 0, 0, 0]])
    assert len(traced([2, 0, 1, 0], None, shrink=9)[0]) == 1


def test_the_steps_of_each_block_are_counted_on_their_own() -> None:
    masked, scored = traced([1, 0, 2, 2, 4, 3], 2)
    assert masked == [[1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 1, 0]]
    assert scored == [[0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 1, 0]]


def masked_blocks(written: int, seed: int, **options: object) -> Passes:
    text = torch.arange(10) < written
    return blocks(10, torch.Generator().manual_seed(seed), written=text, size=3, **options)


def test_a_pass_masks_one_block_in_part_and_what_follows_it() -> None:
    """Of seven tokens in blocks of three: the last block of the text has one token, and nothing else can be in it."""
    counts: dict[int, set[int]] = {0: set(), 3: set(), 6: set()}
    for seed in range(200):
        passes = masked_blocks(7, seed, draws=3, prompt=0.0)
        # The first masks of the passes lie in different blocks, so they say which block a pass has chosen.
        starts = [int(row.nonzero()[0]) // 3 * 3 for row in passes.masked]
        assert sorted(starts) == [0, 3, 6]
        for start, masked, weight in zip(starts, passes.masked, passes.weight):
            end = min(start + 3, 7)
            assert bool(masked[end:].all())
            scored = int(masked[:7].sum())
            counts[start].add(scored - (7 - end))
            # 1 / t for t = scored / 7, and a third of it for each of three passes.
            assert weight.tolist() == pytest.approx([7 / (3 * scored) if m else 0.0 for m in masked[:7]] + [0.0] * 3)
        assert torch.equal(passes.counted, passes.masked.any(0) & (torch.arange(10) < 7))
    assert counts == {0: {1, 2, 3}, 3: {1, 2, 3}, 6: {1}}


def test_more_passes_than_blocks_go_through_the_blocks_again() -> None:
    passes = masked_blocks(5, 0, draws=4, prompt=0.0)
    starts = [int(row.nonzero()[0]) // 3 for row in passes.masked]
    assert sorted(starts) == [0, 0, 1, 1]
    assert starts[:2] == starts[2:]


def test_a_share_of_what_lies_before_the_block_is_masked_too() -> None:
    passes = masked_blocks(10, 0, draws=400, prompt=0.25)
    assert passes.prompt == 0.25
    last = [row for row in passes.masked if bool(row[9]) and int((~row[6:9]).sum()) == 3]
    before = torch.stack(last)[:, :6].float()
    assert float(before.mean()) == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / before.numel()))


def test_the_upper_bound_and_its_gradient_by_hand() -> None:
    """Two passes over a text of three tokens, and one position behind it; no pass masks the third token."""
    beta = 1.5
    p = [[0.5, 0.2, 1.0, 0.3], [0.25, 1.0, 1.0, 0.9]]
    weight = [[0.75, 0.75, 0.0, 2.0], [1.5, 0.0, 0.0, 2.0]]
    log_probs = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    rows = [row[None] for row in log_probs], [torch.tensor(row, dtype=torch.float64)[None] for row in weight]
    found = upper_bound(*rows, torch.tensor([[True, True, True, False]]), beta=beta)
    first = 0.75 * 0.5**beta + 1.5 * 0.25**beta
    second = 0.75 * 0.2**beta
    # Two of three tokens are masked, so each stands for one and a half.
    assert found[0].tolist() == pytest.approx([1.5 * math.log(first) / beta, 1.5 * math.log(second) / beta, 0.0, 0.0])
    found.sum().backward()
    assert log_probs.grad is not None
    shares = [0.75 * 0.5**beta / first, 1.5 * 0.25**beta / first]
    assert log_probs.grad.flatten().tolist() == pytest.approx([1.5 * shares[0], 1.5, 0, 0, 1.5 * shares[1], 0, 0, 0])


def test_one_pass_over_everything_has_equal_bounds() -> None:
    log_probs = log_p(torch.ones(LENGTH, dtype=torch.bool), IDS)[None]
    everywhere = torch.ones(1, LENGTH, dtype=torch.bool)
    found = upper_bound([log_probs], [everywhere.double()], everywhere, beta=1.7)
    torch.testing.assert_close(found, log_probs)


def test_the_likelihood_lies_between_both_bounds() -> None:
    """Of a model that reveals tokens in random order, for every text; Hölder's inequality asks for beta >= L."""
    everywhere, orders = torch.ones(1, LENGTH, dtype=torch.bool), list(itertools.permutations(range(LENGTH)))
    gaps = []
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        ids, exact = torch.tensor(text), 0.0
        for order in orders:
            masked, chance = torch.ones(LENGTH, dtype=torch.bool), 1.0
            for place in order:
                chance *= math.exp(float(log_p(masked, ids)[place]))
                masked[place] = False
            exact += chance / len(orders)
        log_probs, weights = [], []
        for masked in every_mask():
            if k := int(masked.sum()):
                # The integral of t^k (1 - t)^(L - k) / t: the mean of the weight 1 / t over levels and masks.
                share = math.gamma(k) * math.gamma(LENGTH - k + 1) / math.gamma(LENGTH + 1)
                log_probs.append((log_p(masked, ids) * masked)[None])
                weights.append((share * masked.double())[None])
        assert torch.stack(weights).sum(0).tolist()[0] == pytest.approx([1.0] * LENGTH)
        lower = float(sum((w * p).sum() for w, p in zip(weights, log_probs)))
        upper = float(upper_bound(log_probs, weights, everywhere, beta=LENGTH).sum())
        assert lower <= math.log(exact) <= upper
        gaps.append((math.log(exact) - lower, upper - math.log(exact)))
    assert all(max(gap) > 0.1 for gap in zip(*gaps))
