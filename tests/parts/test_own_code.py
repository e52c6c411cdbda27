"""Exceptions of a user's own parts: each names the part, the file and the line, and others pass as they are."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import load_image_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.pooled_ratios import per_unit
from flowgrpo.core.surrogates import clip, held_back
from flowgrpo.parts.asked import answered
from flowgrpo.parts.choice import Choice, named
from flowgrpo.parts.own_code import OwnPart, PartError
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.checking import check
from flowgrpo.training.credit.comparing import compare
from flowgrpo.training.extensions.extension import Evaluation, Extension, Extensions
from flowgrpo.training.stopping import Abandoned, Stopped
from tests.parts.own_parts import write_part


def made(code: str, folder: Path, name: str = "mine", kind: str = "advantage", **options: Any) -> Any:
    """The part in the file of a user."""
    return Choice(kind, f"{write_part(folder, code)}:{name}", options).make()


def compared(part: Callable[..., Any]) -> torch.Tensor:
    """The advantages of four samples."""
    rewards = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    scores = RewardBatch(rewards, ("r",), torch.ones(1), {}, {}, {})
    return compare(part, scores, SimpleNamespace(groups=torch.zeros(4, dtype=torch.long), outcomes=torch.ones(4) > 0))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise ValueError('oops')", "line 3: ValueError: oops"),
        ("return [][3]", "line 3: IndexError: list index out of range"),
        ("return rewards @ rewards[:2]", "line 3: RuntimeError: .*"),
        ("raise SystemExit(0)", "line 3: SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("remembers", [False, True])
def test_an_error_names_part_file_and_line(line: str, said: str, remembers: bool, tmp_path: Path) -> None:
    function = f"# mine\ndef mine(rewards, groups):\n    {line}\n"
    method = f"class mine:\n    def __call__(self, rewards, groups):\n        {line}\n"
    with pytest.raises(PartError, match=rf"^advantage .*mine\.py:mine failed: mine\.py, {said}$") as caught:
        compared(made(method if remembers else function, tmp_path))
    assert type(caught.value.__cause__).__name__ in said


def test_a_constructor_a_hook_and_a_generator_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(PartError, match=r"mine failed: mine\.py, line 3: KeyError: 'a'"):
        made("class mine:\n    def __init__(self, *, low=1):\n        self.low = {}['a']\n", tmp_path)
    hook = made(
        "from flowgrpo.training.extensions import Extension\nclass mine(Extension):\n"
        "    def evaluation_done(self, evaluation):\n        return evaluation.nothing\n",
        tmp_path, kind="extension",
    )  # fmt: skip
    assert isinstance(hook, Extension)
    assert type(hook).__name__ == "mine"
    hooks = Extensions({"mine": hook})
    assert hooks.parts() == {}
    with pytest.raises(PartError, match=r"extension .*mine\.py, line 4: AttributeError"):
        hooks.evaluation_done(Evaluation(0, {}))
    window = write_part(tmp_path, "def mine(iteration, num_steps, seed):\n    yield 1\n    yield 1 / 0\n")
    with pytest.raises(ValueError, match=r"sampler\.plan\.window: window .*mine\.py, line 3: ZeroDivisionError"):
        check(load_image_recipe("mixgrpo", [f"sampler.plan.window={window}:mine"])).require()


def test_a_call_with_the_wrong_arguments_is_named(tmp_path: Path) -> None:
    with pytest.raises(PartError, match=r"mine failed: TypeError: .*__call__.* takes 2 positional arguments but 3"):
        compared(made("class mine:\n    def __call__(self, rewards):\n        return rewards\n", tmp_path))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(15), Abandoned()])
def test_signals_pass(error: BaseException, tmp_path: Path) -> None:
    part = made("def mine(error):\n    raise error\n", tmp_path)
    with pytest.raises(type(error)) as caught:
        answered(part, {"error": lambda: error})
    assert caught.value is error


def test_an_error_of_the_package_passes_and_its_message_gets_a_place(tmp_path: Path) -> None:
    code = "from flowgrpo.parts import plugins\ndef mine(rewards, groups):\n    plugins.{}\n"
    with pytest.raises(AttributeError):
        compared(made(code.format("first_line(3)"), tmp_path))
    with pytest.raises(PartError, match=r"mine\.py, line 3: ValueError: .*nowhere\.py' does not exist"):
        compared(made(code.format("load('nowhere.py:x', 'x', 'word')"), tmp_path))


def test_what_the_users_own_code_catches_stays_what_it_is(tmp_path: Path) -> None:
    code = (
        "class mine:\n    def __call__(self, rewards, groups):\n        try:\n            return self.before()\n"
        "        except KeyError:\n            return rewards\n    def before(self):\n        return {}['a']\n"
    )
    assert compared(made(code, tmp_path)).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_part_of_ones_own_is_still_read_like_a_function_with_bound_options(tmp_path: Path) -> None:
    code = (
        "from flowgrpo.core.surrogates import holds_back\n"
        "@holds_back(lambda log_ratio, adv, logp, mask, *, low: log_ratio > low)\n"
        "def mine(log_ratio, adv, logp, mask, *, low=0.5):\n    return -low * log_ratio * adv\n"
    )
    part = made(code, tmp_path, kind="surrogate", low=0.25)
    assert isinstance(part, partial)
    assert part.keywords == {"low": 0.25}
    assert list(inspect.signature(part).parameters) == ["log_ratio", "adv", "logp", "mask", "low"]
    again = partial(part, low=0.75)
    ratio, ones, mask = torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert held_back(again, ratio, ones, ones, mask).tolist() == [[False]]  # type: ignore[union-attr]
    assert again(ratio, ones, ones, mask).item() == pytest.approx(-0.375)
    assert named("surrogate", again) == part.who
    assert part.who.endswith("mine.py:mine")
    assert named("surrogate", partial(clip, low=0.1)) == "surrogate clip"


@pytest.mark.parametrize("pooled", [False, True])
def test_a_surrogate_without_a_gradient_is_named(pooled: bool, tmp_path: Path) -> None:
    code = "def mine(log_ratio, adv, logp, mask):\n    return -log_ratio.detach() * adv\n"
    surrogate = made(code, tmp_path, kind="surrogate")
    logp = torch.zeros(2, 3, requires_grad=True)
    used = per_unit(surrogate, torch.zeros(2, 3, dtype=torch.long)) if pooled else surrogate
    with pytest.raises(
        ValueError,
        match=r"^surrogate .*mine\.py:mine gives a loss without a gradient, .*compute the loss from `log_ratio`",
    ):
        policy_loss(logp, None, torch.ones(2), surrogate=used)


def test_a_part_of_the_package_is_made_as_before() -> None:
    recipe = load_image_recipe("mixgrpo")
    assert recipe.advantage is not None
    assert not isinstance(recipe.advantage.make(), OwnPart)
