"""What a run does when its device has no memory left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.rewards.base import RewardError
from flowgrpo.training.device_memory import OutOfMemory, lacks_memory, met_in, part_of, said_by
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.losses.transition import TransitionObjective
from flowgrpo.training.memory_advice import SMALLER, WHERE, memory_explained
from flowgrpo.training.mendable import message_of
from flowgrpo.training.session import Session, start
from flowgrpo.training.text.text_task import TextTask
from tests.conftest import Command

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True."
)
SHORT = "CUDA out of memory. Tried to allocate 2.50 GiB"


def allocate(*args: Any, **kwargs: Any) -> Any:
    """Ask for a petabyte, which fails on every machine."""
    return torch.empty(2**50, dtype=torch.uint8)


def test_errors_of_devices_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        allocate()
    assert lacks_memory(caught.value)
    assert lacks_memory(torch.OutOfMemoryError(CUDA))
    assert lacks_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert lacks_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"))


def test_other_errors_are_not_taken_for_them() -> None:
    assert not lacks_memory(None)
    assert not lacks_memory(ValueError("out of memory"))
    assert not lacks_memory(RuntimeError("shapes do not match"))
    assert not lacks_memory(OutOfMemory("out of memory in the update"))
    assert not lacks_memory(RewardError("reward 'taste' failed: OutOfMemoryError: CUDA out of memory.", "taste"))


def test_the_advice_of_torch_is_left_out() -> None:
    assert said_by(torch.OutOfMemoryError(CUDA)) == SHORT
    assert said_by(torch.OutOfMemoryError()) == "OutOfMemoryError"


def test_the_innermost_part_is_remembered() -> None:
    error = RuntimeError("full")
    assert part_of(error) is None
    met_in(error, "decode")
    met_in(error, "rest")
    assert part_of(error) == "decode"


def test_a_command_that_is_no_run_prints_no_traceback() -> None:
    said = message_of(torch.OutOfMemoryError(CUDA))
    assert said is not None
    assert said.startswith(f"out of memory ({SHORT}). Smaller batches")
    assert message_of(OutOfMemory("as it is")) == "as it is"
    assert message_of(RuntimeError("a fault of ours")) is None


@pytest.mark.parametrize(
    ("name", "words", "part", "keys"),
    [
        ("flow_grpo", [], "denoiser", "rollout.batch=4"),
        ("flow_grpo", [], "decode", "rollout.decode_batch=8"),
        ("flow_grpo", [], "update 1/2, batch", "rollout.batch=4"),
        ("draft", [], "update 1/2, batch", "rollout.decode_batch=8 rollout.batch=4"),
        ("direct_align", [], "update 1/2, batch", "rollout.decode_batch=8 rollout.batch=4"),
        ("text", ["rollout={prompts: 2, group: 4, batch: 512}"], "sampling", "rollout.batch=4"),
        # This loss takes whole groups of 12 in a call.
        ("diffusion_nft", ["rollout.batch=20"], "denoiser", "rollout.batch=12"),
        ("text", ["rollout.batch=64"], "sampling", "rollout.batch=32"),
        ("text", ["rollout.batch=64", "evaluate.batch=24"], "sampling", "rollout.batch=32 evaluate.batch=12"),
        ("text", ["rollout.tokens=4096"], "update 1/1, batch", "rollout.tokens=2048"),
        ("masked", ["rollout.batch=64"], "update 1/1, batch", "rollout.batch=32"),
    ],
)
def test_a_part_of_a_run_needs_a_smaller_batch_of_its_own(name: str, words: list[str], part: str, keys: str) -> None:
    sizes = ["rollout.batch=8", "rollout.decode_batch=16"] if name in ("flow_grpo", "draft", "direct_align") else []
    error = torch.OutOfMemoryError(CUDA)
    met_in(error, part)
    with pytest.raises(OutOfMemory) as caught, memory_explained(load_recipe(name, [*sizes, *words]), Path("runs/one")):
        raise error
    said = str(caught.value)
    assert said.startswith(f"out of memory {WHERE.get(part, 'in the update')} ({SHORT}). Go on with smaller batches")
    assert f"`flowgrpo resume runs/one {keys}`; only rounding changes" in said
    assert ("gradient_checkpointing" in said) == part.startswith("update")
    assert said.endswith("`flowgrpo plan runs/one/config.yaml` estimates the memory")


@pytest.mark.parametrize(
    ("words", "processes", "size"),
    [
        ([], 1, 48), ([], 4, 12), ([], 5, 12), ([], 8, 6), (["rollout.chunk=1"], 1, 6), (["rollout.chunk=4"], 4, 12),
        (["rollout.batch=8"], 8, 4),
    ],
)  # fmt: skip
def test_the_batch_is_smaller_than_what_a_process_samples_at_a_time(
    words: list[str], processes: int, size: int
) -> None:
    """Each of 8 prompts has 12 images, and the batch is 96."""
    error, recipe = torch.OutOfMemoryError(CUDA), load_recipe("flow_grpo", words)
    met_in(error, "denoiser")
    with pytest.raises(OutOfMemory, match=f"rollout.batch={size}`"), memory_explained(recipe, Path("one"), processes):
        raise error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flow_grpo", ["rollout.batch=1"]), ("flow_grpo", ["optimizer.cut=edges", "rollout.batch=8"]),
        ("diffusion_nft", ["rollout.batch=12"]),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_smaller_is_not_named(name: str, words: list[str]) -> None:
    error = torch.OutOfMemoryError(CUDA)
    met_in(error, "denoiser")
    with pytest.raises(OutOfMemory) as caught, memory_explained(load_recipe(name, words), Path("runs/one")):
        raise error
    assert "resume" not in str(caught.value)


def test_a_folder_with_a_space_is_quoted() -> None:
    error = torch.OutOfMemoryError(CUDA)
    met_in(error, "denoiser")
    with pytest.raises(OutOfMemory) as caught, memory_explained(load_recipe("flow_grpo"), Path("my runs/one")):
        raise error
    assert "`flowgrpo resume 'my runs/one' rollout.batch=" in str(caught.value)
    assert "`flowgrpo plan 'my runs/one/config.yaml'`" in str(caught.value)


def test_an_error_outside_of_the_parts_and_other_errors_pass() -> None:
    recipe = load_recipe("flow_grpo")
    with pytest.raises(OutOfMemory, match="between the parts of an iteration"), memory_explained(recipe, Path("one")):
        allocate()
    with pytest.raises(RuntimeError, match=r"^shapes$"), memory_explained(recipe, Path("one")):
        raise RuntimeError("shapes")


def test_every_part_has_a_name_and_keys_that_its_recipe_has() -> None:
    recipes = {"images": "flow_grpo", "text": "text", "masked": "masked"}
    for task, parts in SMALLER.items():
        recipe = load_recipe(recipes[task])
        for part, keys in parts.items():
            assert part == "update" or part in WHERE
            for section, _, name in (key.partition(".") for key in keys):
                assert hasattr(getattr(recipe, section), name)


def failing(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, calls: int) -> None:
    """From this call on, the method asks for more memory than there is."""
    own: Callable[..., Any] = getattr(owner, method)
    made = []

    def instead(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return (allocate if len(made) >= calls else own)(*args, **kwargs)

    monkeypatch.setattr(owner, method, instead)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "calls", "where"),
    [
        (FlowPolicy, "sample", 3, "while samples were made"),
        (FlowPolicy, "decode", 3, "while samples were decoded"),
        (TransitionObjective, "backward", 5, "in the update"),
    ],
)
def test_a_run_of_images_tells_what_helps_and_goes_on_to_the_same_numbers(
    small: list[str], command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    owner: type, method: str, calls: int, where: str,
) -> None:  # fmt: skip
    words = [*small, "run={iterations: 3, checkpoint_every: 1000}", "data.heldout=null", "rollout.batch=3"]
    assert command("train", "flow_grpo", *words, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        failing(patch, owner, method, calls)
        status, _, errors = command("train", "flow_grpo", *words, "--out", "run")
    assert status == 1
    assert "Traceback" not in errors
    assert f"error: out of memory {where} (" in errors
    assert "`flowgrpo resume run " in errors
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] in (["iter-000001"], ["iter-000002"])
    assert command("resume", "run")[0] == 0
    one, two = (load_file(tmp_path / name / "lora" / "pytorch_lora_weights.safetensors") for name in ("whole", "run"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_a_run_of_text_tells_what_helps(small_text: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = load_recipe("text", [*small_text, "run={iterations: 3, checkpoint_every: 1000}", "data.heldout=null"])
    with monkeypatch.context() as patch:
        failing(patch, TextTask, "_written", 2)
        with pytest.raises(OutOfMemory, match=r"while samples were made .* rollout.batch=4`"):
            start(recipe, tmp_path / "run").trainer(Silent()).train()
    again = Session(recipe, RunFolder.open(tmp_path / "run")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 1
