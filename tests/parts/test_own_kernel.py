"""A kernel, a solver and a surrogate from a file of a user's."""

import shutil
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.training.checking import check
from tests.parts.own_parts import IMAGES, same_when_resumed, write_part

CODE = '''
from flowgrpo.parts.ranges import Positive


def calm(sigmas, step, *, level: Positive = 0.3):
    """A step whose noise has a share of the next level, as far as the variance allows."""
    std = min(level, 0.9) * sigmas[step + 1]
    return std, (sigmas[step + 1] ** 2 - std**2) ** 0.5


def half(velocity, x, sigma, sigma_next, history, *, share=1.0):
    """Euler's step, or a share of it."""
    return x + share * (sigma_next - sigma) * velocity


def soft(log_ratio, adv, logp, mask, *, width=1.0e-3):
    """A ratio that saturates."""
    return -adv * (1 + width * (log_ratio / width).tanh())
'''


@pytest.mark.slow
def test_a_run_with_parts_of_ones_own_resumes_to_the_last_bit(tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    words = [
        *IMAGES, f"sampler.kernel={{name: '{mine}:calm', level: 0.4}}", f"sampler.solver='{mine}:half'",
        f"objective.surrogate={{name: '{mine}:soft', width: 0.002}}",
    ]  # fmt: skip
    again = same_when_resumed("mixgrpo", [*words, "sampler.plan.window.size=2"], tmp_path)
    assert again.task == "images"
    assert (again.sampler.kernel.short, again.sampler.kernel["level"]) == ("calm", 0.4)
    assert (again.sampler.solver["share"], again.objective["surrogate"]["width"]) == (1.0, 0.002)
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(mine, moved)
    with pytest.raises(RecipeError, match=r"sampler\.kernel: kernel file .*mine\.py' does not exist"):
        load_recipe(tmp_path / "run" / "config.yaml")


def test_what_a_kernel_of_ones_own_gives_is_checked_before_a_model_is_loaded(tmp_path: Path):
    mine = write_part(tmp_path, "def wild(sigmas, step):\n    return -1.0, 0.0\n")
    with pytest.raises(ValueError, match=r"kernel 'wild': step .* has std -1"):
        check(load_recipe("mixgrpo", [f"sampler.kernel={mine}:wild"])).require()


@pytest.mark.parametrize(
    ("key", "code", "written"),
    [
        ("sampler.kernel", "def mine(sigmas): ...", r"kernel\(sigmas, step, \*, \.\.\.\) -> \(std, kappa\)"),
        ("objective.surrogate", "def mine(log_ratio, adv): ...", r"surrogate\(log_ratio \[B, T\], adv"),
        ("advantage", "def mine(rewards, groups, ids, *, eps=1.0): ...", r"advantage\(rewards \[B\], groups \[B\]"),
    ],
)
def test_a_function_that_cannot_be_called_as_its_kind_is_refused(key: str, code: str, written: str, tmp_path: Path):
    mine = write_part(tmp_path, code + "\n")
    with pytest.raises(
        RecipeError, match=rf"mine has the parameters \(.*\), but it is called with .*; write {written}"
    ):
        load_recipe("mixgrpo", [f"{key}={mine}:mine"])


@pytest.mark.parametrize("found", [None, 0.5, (0.1, 0.2, 0.3), ("a", "b")])
def test_a_kernel_that_gives_anything_but_two_numbers_is_refused(found: object):
    with pytest.raises(ValueError, match=r"kernel 'mine' has to give two numbers, \(std, kappa\); it gave"):
        Kernel("mine", function=lambda sigmas, step: found).coefficients([1.0, 0.5, 0.0], 0)  # type: ignore


def test_a_surrogate_without_a_loss_for_each_entry_is_refused():
    entries = torch.zeros(2, 3)
    with pytest.raises(
        ValueError, match=r"a tensor of shape \(2, 3\) like `log_ratio`; it gave a tensor of shape \(\)"
    ):
        policy_loss(entries, entries, torch.ones(2), entries > -1, surrogate=lambda ratio, *_: ratio.sum())
    with pytest.raises(ValueError, match="it gave NoneType"):
        policy_loss(entries, entries, torch.ones(2), entries > -1, surrogate=lambda *_: None)  # type: ignore
