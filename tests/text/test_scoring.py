"""Log-probs of completions: against the definition, and the shared prefix against the plain path."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowgrpo.core import categorical
from flowgrpo.core.categorical import pick, token_log_probs
from flowgrpo.estimate.footprint import LiveBytes
from flowgrpo.text.model import LanguageModel
from flowgrpo.text.scoring import (
    completion_log_probs,
    completion_statistics,
    right_padded,
    token_entropies,
)

PROMPTS = ["1+2=", "47-85=", "9"]
OWNER = [0, 0, 1, 2, 2, 2]
COMPLETIONS = ["3", "12", "-38", "9-9+", "", "1"]


def inputs(language: LanguageModel) -> tuple[list[list[int]], list[list[int]]]:
    end = language.ends[0]
    return [language.encode(p) for p in PROMPTS], [[*language.encode(c), end] for c in COMPLETIONS]


def gradients(language: LanguageModel, shared: bool, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    prompts, completions = inputs(language)
    found, _ = completion_log_probs(language, prompts, completions, OWNER, shared_prefix=shared)
    language.model.zero_grad()
    (found * weights).sum().backward()
    return {name: p.grad.clone() for name, p in language.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_one_sequence_at_a_time(language: LanguageModel, shared: bool, temperature: float) -> None:
    prompts, completions = inputs(language)
    found, mask = completion_log_probs(
        language, prompts, completions, OWNER, temperature=temperature, shared_prefix=shared
    )
    assert found.shape == mask.shape == (6, 5)
    assert mask.sum(1).tolist() == [2, 3, 4, 5, 1, 2]
    assert (found[~mask] == 0).all()
    for row, (p, ids) in enumerate(zip(OWNER, completions)):
        whole = torch.tensor([prompts[p] + ids])
        with torch.no_grad():
            chances = (language.model(whole).logits[0].double() / temperature).log_softmax(-1)
        wanted = [float(chances[len(prompts[p]) - 1 + t, token]) for t, token in enumerate(ids)]
        assert found[row, : len(ids)].tolist() == pytest.approx(wanted, abs=2e-4)


def test_a_shared_prefix_has_the_gradient_of_the_plain_path(language: LanguageModel) -> None:
    weights = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    plain, shared = (gradients(language, how, weights) for how in (False, True))
    assert plain.keys() == shared.keys()
    largest = max(float(g.abs().max()) for g in plain.values())
    for name in plain:
        assert torch.allclose(plain[name], shared[name], atol=2e-5 * largest), name


def test_a_shared_prefix_encodes_each_prompt_once(language: LanguageModel) -> None:
    prompts, completions = inputs(language)
    assert not language.keeps_states  # finds it out with a call of the model, once
    seen: list[int] = []
    handle = language.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(args[0].numel())
    )
    with torch.no_grad():
        completion_log_probs(language, prompts, completions, OWNER)
        completion_log_probs(language, prompts, completions, OWNER, shared_prefix=False)
    handle.remove()
    longest_prompt, longest = 6, 5
    assert seen == [3 * longest_prompt, 6 * (longest - 1), 6 * (longest_prompt + longest)]


def test_equal_completions_of_a_prompt_are_scored_once(language: LanguageModel) -> None:
    prompts, _ = inputs(language)
    end = language.ends[0]
    texts = ["38", "7", "38", "-9", "7", "38", "38", ""]
    owner = [0, 0, 0, 1, 1, 1, 2, 2]  # "38" is twice with the first prompt, and once with each of the others
    completions = [[*language.encode(text), end] for text in texts]
    weights = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    assert not language.keeps_states
    seen: list[int] = []
    handle = language.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(len(args[0]))
    )
    found: dict[bool, tuple[torch.Tensor, ...]] = {}
    for shared in (False, True):
        scored = completion_statistics(language, prompts, completions, owner, shared_prefix=shared, entropy=True)
        assert scored.entropy is not None
        language.model.zero_grad()
        ((scored.log_probs + 0.1 * scored.entropy) * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in language.model.parameters()])
        found[shared] = scored.log_probs.detach(), scored.entropy.detach(), gradient, scored.mask.float()
    handle.remove()
    assert seen == [8, 3, 7]  # the plain path; then the prompts, and their different completions
    for plain, shared in zip(found[False], found[True]):
        assert torch.allclose(plain, shared, atol=2e-5 * float(plain.abs().max()))
    assert torch.equal(found[True][0][0], found[True][0][2])


def test_completions_of_one_token_need_the_prompt_alone(language: LanguageModel) -> None:
    prompts, _ = inputs(language)
    ids = [[4], [5], [6]]
    shared, _ = completion_log_probs(language, prompts, ids, [0, 1, 2])
    plain, _ = completion_log_probs(language, prompts, ids, [0, 1, 2], shared_prefix=False)
    assert torch.allclose(shared, plain, atol=1e-5)


def test_right_padding_by_hand() -> None:
    ids, mask = right_padded([[5, 6], [7]], 9, torch.device("cpu"))
    assert ids.tolist() == [[5, 6], [7, 9]]
    assert mask.tolist() == [[True, True], [True, False]]


def test_half_precision_logits_are_scored_in_float32_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(categorical, "NUMBERS", 2 * 7)
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 5, 7, generator=generator)).bfloat16().requires_grad_()
    ids = torch.randint(7, (2, 5), generator=generator)
    found = token_log_probs(logits, ids, 0.5)
    assert found.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    wanted = (exact / 0.5).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    found.sum().backward()
    wanted.sum().backward()
    # The gradient comes back in bfloat16, which has 8 bits.
    assert torch.allclose(logits.grad.double(), exact.grad, atol=2**-8 * float(exact.grad.abs().max()))


@pytest.mark.parametrize("numbers", [1, 3 * 7, 5 * 7, 10 * 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_their_gradient_are_those_of_a_softmax_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, numbers: int, temperature: float
) -> None:
    """However many logits are taken at once; logits after the last token have a gradient of 0."""
    monkeypatch.setattr(categorical, "NUMBERS", numbers)
    generator = torch.Generator().manual_seed(0)
    logits, plain = (torch.randn(4, 6, 7, generator=generator.manual_seed(1)).requires_grad_() for _ in range(2))
    ids = torch.randint(7, (4, 5), generator=generator)
    weight = torch.randn(4, 5, generator=generator)
    scaled = plain[:, :5] / temperature
    wanted = scaled.gather(-1, ids[..., None]).squeeze(-1) - scaled.logsumexp(-1)
    found = token_log_probs(logits, ids, temperature)
    assert torch.equal(found, wanted)
    for value in (found, wanted):
        (value * weight).sum().backward()
    assert torch.equal(logits.grad, plain.grad)
    assert (logits.grad[:, 5] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_log_probs_is_the_only_tensor_of_the_size_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The largest number of bytes alive in a forward and backward pass, over the logits."""
    monkeypatch.setattr(categorical, "NUMBERS", 5_000)
    logits = torch.randn(4, 33, 5_000).to(dtype).requires_grad_()
    ids = torch.randint(5_000, (4, 32))
    with LiveBytes() as alive:
        token_log_probs(logits, ids).sum().backward()
    gradient = logits.numel() * logits.element_size()
    assert gradient <= alive.most <= gradient + 4 * 4 * categorical.NUMBERS


def test_entropies_by_hand() -> None:
    # Half and half; a certain token; a third each of three, with a fourth ruled out.
    logits = torch.tensor([[[0.0, 0, -200, -200], [300, 0, 0, 0], [1, 1, 1, -torch.inf]]])
    found = token_entropies(logits)
    assert found[0].tolist() == pytest.approx([math.log(2), 0.0, math.log(3)], abs=1e-6)
    # A temperature divides logits: two tokens 2 apart at 2 are 1 apart.
    p = 1 / (1 + math.exp(-1))
    hand = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert token_entropies(torch.tensor([[[2.0, 0.0]]]), 2.0).item() == pytest.approx(hand)


def test_the_gradient_of_an_entropy_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """dH / dlogit = -p (log p + H) / temperature, by chunks that are computed again, and finite where p is 0."""
    monkeypatch.setattr("flowgrpo.text.scoring.CHUNK", 2)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1, 5, generator=generator).requires_grad_()
    token_entropies(logits, 0.5).sum().backward()
    log_p = (logits.detach() / 0.5).log_softmax(-1)
    spread = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    assert torch.allclose(logits.grad, -log_p.exp() * (log_p + spread) / 0.5, atol=1e-6)
    ruled_out = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
    token_entropies(ruled_out).sum().backward()
    assert ruled_out.grad.isfinite().all()
    assert ruled_out.grad[0, 0, 2] == 0


@pytest.mark.parametrize("shared", [True, False])
def test_entropies_of_completions_are_those_of_the_logits(language: LanguageModel, shared: bool) -> None:
    prompts, completions, owner = [[4, 5, 6], [7]], [[8, 9, 3], [5], [6, 4], [3, 3]], [0, 0, 1, 1]
    found = completion_statistics(
        language, prompts, completions, owner, temperature=0.7, shared_prefix=shared, entropy=True
    )
    assert found.entropy is not None
    for row, ids in enumerate(completions):
        whole = torch.tensor([[*prompts[owner[row]], *ids]])
        logits = language.model(whole).logits[0, -len(ids) - 1 : -1] / 0.7
        wanted = torch.distributions.Categorical(logits=logits).entropy()
        assert torch.allclose(found.entropy[row, : len(ids)], wanted, atol=1e-5)
        assert (found.entropy[row, len(ids) :] == 0).all()
    assert completion_statistics(language, prompts, completions, owner).entropy is None


class Made(TorchDispatchMode):
    """Notes the name of the operation and the dtype of each tensor with `size` columns that takes memory of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, list[tuple[str, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # A view is of memory that another operation has taken.
        if isinstance(made, torch.Tensor) and not func.is_view and made.ndim and made.shape[-1] == self.size:
            self.found.append((func._schema.name, made.dtype))
        return made


def test_logits_are_neither_joined_nor_divided_by_one(language: LanguageModel) -> None:
    prompts, ids = [[3, 4], [5]], [[4, 5, 6], [7, 8]]
    with Made(language.model.config.vocab_size) as made:
        completion_log_probs(language, prompts, ids, [0, 1])
    names = {name for name, _ in made.found}
    assert names
    assert names & {"aten::cat", "aten::div"} == set()


def test_sampling_keeps_one_table_in_float64() -> None:
    with Made(50) as made:
        pick(torch.randn(4, 50), torch.rand(4, dtype=torch.float64))
    assert [name for name, dtype in made.found if dtype == torch.float64] == ["aten::cumsum"]
