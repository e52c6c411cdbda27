"""Noise levels, windows, trees and averages move as in the methods' released code, or as a test here says otherwise."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn

from flowgrpo.convert.verl_omni_methods import DECAYS
from flowgrpo.core.forward_process import levels_to_draw
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import branch_plan, spine_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import compress_tail, shifted_sigmas
from flowgrpo.samplers.windows import decay, exp_decay, progressive, subset
from flowgrpo.training.losses.noise_levels import draw_steps
from flowgrpo.weights.averages import Ema
from tests.releases.comparing import numbers

WINDOWS = {"progressive": progressive, "decay": decay, "exp_decay": exp_decay}


def test_shifted_tables_are_those_of_the_release() -> None:
    asked = numbers("flux_levels")
    for table in asked["tables"]:
        assert shifted_sigmas(len(table) - 1, asked["shift"]) == pytest.approx(table, rel=1e-6)


def test_tables_of_unirl_are_shifted_tables() -> None:
    for asked in numbers("unirl_levels")["tables"]:
        assert shifted_sigmas(asked["steps"], asked["shift"]) == pytest.approx(asked["sigmas"], rel=1e-6)


def test_the_shift_of_klein_is_the_one_of_the_pipeline_that_a_converted_file_leaves_it_to() -> None:
    asked = numbers("unirl_klein_levels")
    assert [compute_empirical_mu(*place) for place in asked["grid"]] == pytest.approx(asked["mu"])


def test_windows_of_unirl_move_as_those_of_its_converted_files() -> None:
    """Their last window holds the last step. Here no window does, so the last one starts a step earlier."""
    asked = numbers("unirl_windows")
    found = [list(progressive(k, 10, 0, size=4, stride=3, interval=5)) for k in range(10)]
    assert found == asked["slides"][:10]
    assert list(progressive(10, 10, 0, size=4, stride=3, interval=5)) == [5, 6, 7, 8]
    assert asked["slides"][10] == [6, 7, 8, 9]
    assert asked["whole"] == [list(range(6))] * 2
    theirs = {tuple(steps) for steps in asked["of_range"]}
    assert {tuple(subset(k, 10, 0, size=3, interval=1, stop=5)) for k in range(200)} >= theirs
    assert len(theirs) > 5


def test_windows_move_as_in_the_release_until_the_end_of_the_schedule() -> None:
    """After that, the release shortens its window, or leaves it empty; here it starts over."""
    for schedule in numbers("mixgrpo_windows")["schedules"]:
        size = schedule["group_size"]
        window = WINDOWS[schedule["sample_strategy"]]
        options = {"size": size, "interval": schedule["iters_per_group"]}
        options["stride"] = 1 if schedule["prog_overlap"] else size
        found = [list(window(k, schedule["max_timesteps"] + 1, 0, **options)) for k in range(len(schedule["windows"]))]
        assert found == schedule["windows"], schedule["sample_strategy"]


def test_fewer_levels_after_a_window_are_those_of_the_release() -> None:
    """Where the release keeps one level after the window, its table ends above 0; here every table ends at 0."""
    asked, short = numbers("mixgrpo_flash_tables"), 0
    whole = shifted_sigmas(asked["steps"], asked["shift"])
    for row in asked["tables"]:
        ends_above = row["sigmas"][-1] > 0.0
        short += ends_above
        expected = [*row["sigmas"], 0.0] if ends_above else row["sigmas"]
        assert compress_tail(whole, row["last"], row["ratio"]) == pytest.approx(expected, rel=1e-5)
    assert short == 3


def test_a_tree_has_the_edges_of_the_release() -> None:
    asked = numbers("branchgrpo_edges")
    plan = branch_plan(shifted_sigmas(asked["steps"], 3.0), asked["splits"], Kernel("dance_sde", 0.3))
    counts = plan.counts()
    assert counts.edges == sum(asked["edges"]) == 218
    # The release also trains the last step. Its ratio is mostly rounding, so here it is not trained.
    assert counts.trained_edges == sum(asked["edges"][:-1]) == 202


def test_pruned_steps_move_the_other_way_in_the_release() -> None:
    """The release prunes earlier and earlier steps until the window reaches its stop; here it moves to later steps.

    The paper describes a window that moves to later steps. The first window is the same. A depth is a step plus 1.
    """
    asked = numbers("branchgrpo_depths")
    starts = [row["pruned"][0] - 1 for row in asked["windows"]]
    assert all(row["pruned"] == list(range(row["pruned"][0], row["pruned"][0] + 4)) for row in asked["windows"])
    options = {"size": asked["size"], "interval": asked["interval"], "start": 5}
    found = [progressive(row["iteration"], 20, 0, **options)[0] for row in asked["windows"]]
    moved = [first - start for start, first in zip(found, starts)]
    assert starts[:2] == [14, 14]
    assert found[:2] == [5, 5]
    assert all(left > right for left, right in zip(moved[::2], moved[2:12:2]))
    assert min(starts) == asked["stop"] - 1


def test_width_pruning_of_the_release_keeps_the_first_steps_of_every_image() -> None:
    """Mode 1 keeps the better half of the later edges of each image, and all of them have the advantage of the image.

    So it keeps their first half, and no image is preferred to its sibling. The paper keeps the better of two siblings,
    as here. Mode 2 keeps the images with the best and the worst rewards, as `extremes` does.
    """
    asked = numbers("branchgrpo_widths")
    first, second = asked["modes"]
    assert all(kept == list(range(15)) for kept in first["kept"])
    order = sorted(range(16), key=lambda leaf: asked["rewards"][leaf])
    whole = {leaf for leaf in range(16) if second["kept"][leaf] == list(range(20))}
    assert whole == {*order[:4], *order[-4:]}
    assert all(second["kept"][leaf] == list(range(10)) for leaf in set(range(16)) - whole)


def test_an_update_of_the_release_has_twelve_edges_of_a_process() -> None:
    """Two trees of 218 edges make 37 updates; the last one has what is left, and every edge weighs the same."""
    asked = numbers("branchgrpo_updates")
    assert asked["edges"] == sum(numbers("branchgrpo_edges")["edges"])
    assert asked["sizes"] == pytest.approx([asked["accumulation"]] * 36 + [4], rel=1e-4)


def test_branches_are_finished_as_in_the_release() -> None:
    """A denoiser that multiplies the state multiplies the image, too, and by how much says which levels it has seen.

    Both strides share the first two levels. Where the stride does not divide the rest, the release's table ends above
    0, and its image is the clean prediction of the level before. Here the branch also takes that last step.
    """
    asked, short = numbers("g2rpo_completions"), []
    sigmas, slope = shifted_sigmas(len(asked["sigmas"]) - 1, 3.0), asked["slope"]
    assert sigmas == pytest.approx(asked["sigmas"], rel=1e-6)
    # The release truncates times to thousandths.
    places = {int(1000 * sigma): level for level, sigma in enumerate(sigmas[:-1])}
    model = Sloping(slope)
    for split in range(8):
        plan = spine_plan(sigmas, [split], Kernel("flow_sde", 0.7), branches=1, completions=(1, 2), lead=1)
        model.calls.clear()
        rollout = RolloutRunner(model, plan, (4, 3), dtype=torch.float32, batch=8).run([5])
        released = {row["stride"]: row for row in asked["branches"] if row["split"] == split}
        images = dict(zip(rollout.stride[rollout.leaf].tolist(), rollout.x))
        assert images.keys() == released.keys()
        expected: Counter[int] = Counter()
        for stride, row in released.items():
            levels = [places[round(1000 * time)] for time in row["times"]]
            growth = torch.tensor(row["image"][0]) / torch.tensor(asked["start"][0])
            if levels[-1] + stride < len(sigmas) - 1:
                short.append((split, stride))
                before, last = sigmas[levels[-1]], sigmas[levels[-1] + stride]
                growth *= (1 + (last - before) * slope) * (1 - last * slope) / (1 - before * slope)
                levels.append(levels[-1] + stride)
            torch.testing.assert_close(images[stride], rollout.transitions[0].x_next[0] * growth, rtol=1e-6, atol=1e-6)
            expected.update(levels)
        shared = dict.fromkeys((split + 1, split + 2), 1)
        assert {level: calls for level, calls in model.calls.items() if level > split} == expected | shared
    assert short == [(split, 2) for split in range(1, 8, 2)]


class Sloping:
    """A denoiser whose velocity is a multiple of the state; it counts the states of each level."""

    def __init__(self, slope: float) -> None:
        self.slope, self.calls = slope, Counter[int]()

    def __call__(self, x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        self.calls[i] += len(x)
        return self.slope * x


class Single:
    """One weight, whose average is asked for."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight}

    def write(self) -> None:
        """Nothing else holds the weight."""


def decays(rise: float, cap: float, count: int, first: float = 0.0, after: int = 0) -> list[float]:
    """The decay of each of the first updates of an average: what is left of an average of 1 if the weight is 0."""
    found = []
    single = Single()
    average = Ema(single, decay=cap, every=1, rise=rise, first=first, after=after)
    for _ in range(count):
        for shadow in average._average:
            shadow.fill_(1.0)
        average.step()
        found.append(float(average._average[0]))
    return found


def test_the_old_policy_rises_as_in_the_release() -> None:
    asked = numbers("dgpo_decay")
    found = decays(0.001, 0.3, max(asked["updates"]) + 1)
    assert [found[n] for n in asked["updates"]] == pytest.approx(asked["decays"], abs=1e-6)


def test_the_two_averages_of_crd_rise_as_in_the_release() -> None:
    asked = numbers("crd_decays")
    count = max(asked["updates"]) + 1
    compared, sampling = decays(0.005, 0.999, count, first=0.25), decays(0.0075, 0.999, count, after=75)
    for name, found in (("compared", compared), ("sampling", sampling)):
        assert [found[n] for n in asked["updates"]] == pytest.approx(asked["decays"][name], abs=1e-6)


@pytest.mark.parametrize("kind", DECAYS)
def test_the_old_policy_of_verl_omni_rises_as_that_of_its_converted_scripts(kind: str) -> None:
    """By one optimizer step of an iteration; a converted script has the same numbers."""
    asked, (flat, rise, most) = numbers("verl_omni_decays")[kind], DECAYS[kind]
    found = decays(rise, most, 260, first=0.0 if flat else rise, after=max(flat - 1, 0)) if rise else [0.0] * 260
    assert [found[n - 1] for n in range(1, 260, 7)] == pytest.approx(asked, abs=1e-6)


def test_levels_are_drawn_from_the_ranges_of_the_release() -> None:
    """Nine tenths of a rollout's levels, without pure noise, are `levels` with a `skip` of 1."""
    for row in numbers("awm_levels")["ranges"]:
        steps = levels_to_draw(row["steps"], int(0.9 * row["steps"]), skip=1)
        drawn: list[set[int]] = [set() for _ in range(row["times"])]
        for seed in range(200):
            levels = draw_steps(steps, row["times"], "ranges", torch.Generator().manual_seed(seed))
            for found, level in zip(drawn, levels, strict=True):
                found.add(level)
        assert drawn == [set(range(int(first), int(end))) for first, end in zip(row["first"], row["end"])]


@pytest.mark.parametrize(("name", "cap"), [("diffusion_nft_decay", 0.5), ("awm_decay", 0.3)])
def test_an_average_rises_as_in_the_release_one_update_later(name: str, cap: float) -> None:
    """These releases count the update that has just been made; here the first update copies the weights."""
    asked = numbers(name)
    expected = asked["decays"]["1"] if isinstance(asked["decays"], dict) else asked["decays"]
    found = decays(0.001, cap, max(asked["updates"]) + 1)
    assert [found[n] for n in asked["updates"]] == pytest.approx(expected, abs=1e-6)


def test_the_second_kind_of_decay_starts_late() -> None:
    """DiffusionNFT's second kind has no part in this package: it is 0 for 75 updates, and then rises by 0.0075."""
    asked = numbers("diffusion_nft_decay")
    expected = [min(0.0075 * max(n - 75, 0), 0.999) for n in asked["updates"]]
    assert asked["decays"]["2"] == pytest.approx(expected)
