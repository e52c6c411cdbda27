"""An extension from a file of a user's: it remembers, resumes, and sees the samples of all processes."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.extensions.extension import Comparison, Extension, Extensions
from flowgrpo.training.session import start
from tests.parts.own_parts import IMAGES, same_when_resumed, write_part
from tests.training.test_text_processes import launched, lines_of

TEXT = [
    "rollout={prompts: 3, group: 4, batch: 12, tokens: 600}", "generation.max_tokens=6", "data.heldout=null",
    "rewards=[{name: length, options: {limit: 6, buffer: 4}}]",
    "run={iterations: 3, checkpoint_every: 1, sample_every: 2}",
]  # fmt: skip
CODE = '''
from flowgrpo.parts.ranges import Share
from flowgrpo.training.extensions import Extension


class Steady(Extension):
    """Advantages over the running mean of their size.

    Args:
        decay: Weight of the past.
    """

    remembers = ("size",)

    def __init__(self, *, decay: Share = 0.9):
        self.decay, self.size = decay, 1.0

    def samples_compared(self, advantages, comparison):
        self.size = self.decay * self.size + (1 - self.decay) * float(advantages.abs().mean())
        return advantages / self.size

    def record(self):
        return {"steady/size": self.size}
'''


BASE = "from flowgrpo.training.extensions import Extension\n\n\n"


@pytest.mark.slow
@pytest.mark.parametrize(("base", "words"), [("flow_grpo", IMAGES), ("text", TEXT)])
def test_a_run_with_an_extension_of_ones_own_resumes_to_the_last_bit(base: str, words: list[str], tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    chosen = f"extensions=[curriculum, {{name: '{mine}:Steady', decay: 0.5}}]"
    again = same_when_resumed(base, [*words, chosen], tmp_path)
    assert [choice.short for choice in again.extensions] == ["curriculum", "Steady"]
    assert again.extensions[1]["decay"] == 0.5
    [*_, last] = sorted((tmp_path / "run" / "checkpoints").glob("iter-*"))
    assert sorted(file.name for file in (last / "extensions").iterdir()) == ["Steady.pt", "curriculum.pt"]
    sizes = [line["steady/size"] for line in lines_of(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(set(sizes)) == len(sizes) > 1


@pytest.mark.slow
def test_two_processes_remember_what_one_does(tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    words = [*TEXT, f"extensions=['{mine}:Steady', '{mine}:Steady']", "optimizer={eps: 1.0e-3}", "run.iterations=2"]
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count) / "run"
        folder.parent.mkdir()
        launched(words, folder, count, {})
        found.append([line["steady/size"] for line in lines_of(folder / "metrics.jsonl") if "loss" in line])
        names = {file.name for file in folder.glob("checkpoints/*/extensions/*")}
        assert names == {"Steady.pt", "Steady-2.pt"}
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_attributes_that_an_extension_names_are_kept() -> None:
    class Counting(Extension):
        remembers = ("seen",)

        def __init__(self) -> None:
            self.seen = [3]

    one, again = Counting(), Counting()
    one.seen.append(5)
    state = one.state_dict()
    assert state == {"seen": [3, 5]}
    again.load_state_dict(state)
    again.seen.append(7)
    # What is read may be read again.
    assert (again.seen, state) == ([3, 5, 7], {"seen": [3, 5]})
    assert list(Extensions({"counting": one, "plain": Extension()}).parts()) == ["extensions/counting"]


def test_an_extension_of_ones_own_is_short_and_documented():
    assert len(CODE.strip().splitlines()) <= 30
    page = (Path(__file__).parents[2] / "docs" / "extensions.md").read_text()
    assert inspect.cleandoc(CODE) in page


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        ("class Odd:\n    pass\n", [], "write a class that inherits from flowgrpo.training.extensions.Extension"),
        ("def odd(rows):\n    return rows\n", [], "write a class that inherits from"),
        (
            f"{BASE}class Odd(Extension):\n"
            "    def samples_compared(self, advantages, comparison):\n        return advantages\n",
            ["credit=anchor", "sampler.plan.shared_noise=true", "advantage.scale=group"],
            "changes the advantages of samples, not of steps",
        ),
        (
            f"{BASE}class Odd(Extension):\n    def __init__(self):\n        raise ValueError('not today')\n",
            [],
            r"extension .*mine\.py:Odd failed: mine\.py, line \d: ValueError: not today",
        ),
        (
            f"{BASE}from flowgrpo.parts.ranges import Given\n\n\nclass Odd(Extension):\n"
            "    def __init__(self, *, trained: Given[list]):\n        self.trained = trained\n",
            [],
            "extension Odd asks for 'trained', which a run does not give; it gives recipe, rewards, evaluated",
        ),
    ],
)
def test_what_is_no_extension_is_refused(code: str, words: list[str], message: str, tmp_path: Path):
    name = "odd" if "def odd" in code else "Odd"
    mine = write_part(tmp_path, code)
    with pytest.raises(ValueError, match=message):
        check(load_recipe("mixgrpo_flash_guard", [f"extensions=['{mine}:{name}']", *words])).require()


def test_an_option_that_an_extension_has_not_is_named(tmp_path: Path):
    mine = write_part(tmp_path, CODE)
    with pytest.raises(RecipeError, match=r"has no option 'decya'; did you mean 'decay'\?"):
        load_recipe("text", [f"extensions=[{{name: '{mine}:Steady', decya: 0.5}}]"])


@pytest.mark.slow
def test_as_many_prompts_are_drawn_as_there_were(tmp_path: Path):
    mine = write_part(
        tmp_path,
        f"{BASE}class Few(Extension):\n"
        "    def prompts_drawn(self, rows, everything, iteration):\n        return rows[:1]\n",
    )
    with pytest.raises(ValueError, match="extension Few drew 1 prompts for iteration 0; return"):
        same_when_resumed("text", [*TEXT, f"extensions=['{mine}:Few']"], tmp_path)


@pytest.mark.parametrize("hook", ["prompts_drawn", "samples_scored", "samples_compared", "advantages_made"])
def test_a_hook_that_returns_nothing_is_named(hook: str) -> None:
    mine: Any = type("Mine", (Extension,), {hook: lambda *given: None})
    given = {"prompts_drawn": ([], [], 0), "samples_scored": (None,), "samples_compared": (torch.ones(4), None)}
    with pytest.raises(ValueError, match=rf"{hook}\(\) of extension mine returned NoneType; return the "):
        getattr(Extensions({"mine": mine()}), hook)(*given.get(hook, (torch.ones(4), None, None)))


def test_advantages_of_another_shape_are_refused() -> None:
    class Mean(Extension):
        def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
            return advantages.mean()

    with pytest.raises(
        ValueError, match=r"of extension mean returned advantages of shape \(\); .* of the shape \(4,\)"
    ):
        Extensions({"mean": Mean()}).samples_compared(torch.ones(4), None)  # type: ignore[arg-type]


def test_advantages_that_are_no_numbers_are_refused() -> None:
    class Odd(Extension):
        def advantages_made(self, advantages: Tensor, samples: object, batch: object) -> Tensor:
            return advantages / (advantages - 1.0)

    given = torch.tensor([0.0, 1.0, 2.0, 1.0])
    with pytest.raises(ValueError, match=r"^advantages_made\(\) of extension odd gave inf for 2 of 4 samples or steps"):
        Extensions({"odd": Odd()}).advantages_made(given, None, None)  # type: ignore[arg-type]
    # A sample without a score has none before, and needs none after.
    missing = torch.tensor([float("nan"), 2.0])
    found = Extensions({"odd": Odd()}).advantages_made(missing, None, None)  # type: ignore[arg-type]
    assert found[1] == 2.0


@pytest.mark.slow
def test_a_state_that_no_resume_can_read_ends_the_run_before_its_second_iteration(tmp_path: Path) -> None:
    mine = write_part(
        tmp_path,
        f"import numpy as np\n{BASE}class Counts(Extension):\n"
        "    def __init__(self):\n        self.seen = {}\n"
        "    def update_done(self, samples, record):\n        self.seen['rate'] = np.float64(0.5)\n"
        "    def state_dict(self):\n        return {'seen': self.seen}\n",
    )
    message = (
        r"the state_dict\(\) of extensions/Counts has a numpy.float64 at \['seen'\]\['rate'\], which no resume can "
        r"read; return numbers, text, tensors, and lists and mappings of them \(of NumPy values, write .item\(\) or "
    )
    words = [*TEXT, f"extensions=['{mine}:Counts']", "run.checkpoint_every=100"]
    trainer = start(load_recipe("text", words), tmp_path / "run").trainer(Silent())
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.next_iteration == 1
