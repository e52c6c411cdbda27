"""The checks of the conformance kit, in the order in which they are made.

Each check takes a `Subject` and returns one line that says what it saw. An exception is a failure, except
`NotApplicable`. The checks use the same `Denoiser`, `FlowPolicy` and `TrainedWeights` as training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...samplers.kernels import KERNELS, Kernel
from ...samplers.plans import Plan, StepPlan
from ...weights.lora_layer import add_in_place
from ...weights.trained import LoraSpec, TrainedWeights, trainable_modules
from ..callers import stacked
from ..capture import PipelineCall, company
from ..denoiser import Denoiser
from ..experience import Experience
from ..policy import FlowPolicy
from ..prompt_cache import PromptCache
from .given_pictures import given
from .subject import Failure, NotApplicable, Subject

_RELATIVE_SLOPE_ERROR = 0.02
# No single step fits all classes: a step is too long if the prediction bends strongly, and too short if a class rounds
# inside (Kandinsky 5, to bfloat16).
_SLOPE_STEPS = (1e-3, 1e-2, 1e-4)
# Largest difference, relative to the largest value, between computations that differ only in the order of their sums.
_ROUNDING = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}


def probe(subject: Subject) -> str:
    """The pipeline shows its state and its table, and one way of evaluation is exact."""
    subject.pipe = subject.fresh()
    denoiser = Denoiser(subject.pipe, num_steps=subject.steps, call=subject.call, example=subject.texts[0])
    denoiser.self_check(subject.prompts())
    subject.denoiser = denoiser
    shown = denoiser.probe
    sigmas = " ".join(f"{sigma:.3g}" for sigma in shown.sigmas)
    return f"state {list(shown.latent_shape)} {str(shown.dtype).removeprefix('torch.')}, sigmas {sigmas}"


@torch.no_grad()
def velocity(subject: Subject) -> str:
    """The velocity is finite, depends on state, step and prompt, and does not depend on another row."""
    denoiser, prompts, x = subject.known, subject.prompts(), subject.noise()
    v = denoiser.velocity(x, 1, prompts)
    if v.shape != x.shape or not bool(v.isfinite().all()):
        raise Failure(f"shape {tuple(v.shape)} for states {tuple(x.shape)}, all finite: {bool(v.isfinite().all())}")
    other = x.clone()
    other[0] = subject.noise(1)[0]
    moved = denoiser.velocity(other, 1, prompts)
    if torch.equal(moved[0], v[0]):
        raise Failure("does not depend on the state")
    scale = float(v.abs().max())
    leak = float((moved[1:] - v[1:]).abs().max()) if subject.batch > 1 else 0.0
    if leak > _rounding(subject) * scale:
        raise Failure(f"depends on the state of another row, by {leak:.2g} of {scale:.2g}")
    # A longer prompt makes a class pad the others, and some classes attend to the padding.
    for texts in (prompts, prompts[::-1]):
        alone = torch.cat([denoiser.velocity(x[k : k + 1], 1, texts[k : k + 1]) for k in range(len(x))])
        leak = float((denoiser.velocity(x, 1, texts) - alone).abs().max())
        if leak > _rounding(subject) * scale:
            raise Failure(f"depends on the prompt of another row, by {leak:.2g} of {scale:.2g}")
    if torch.equal(denoiser.velocity(x, 0, prompts), v):
        raise Failure("does not depend on the step")
    if torch.equal(denoiser.velocity(x, 1, subject.prompts(1)), v):
        raise Failure("does not depend on the prompt")
    return f"finite, at most {scale:.2g}; depends on state, step and prompt"


def replay(subject: Subject) -> str:
    """A replay of every step of the pipeline's own stochastic loop is exact to the last bit, with gradient enabled."""
    denoiser, record = subject.known, subject.record(seed=7)
    for i, x in enumerate(record.states):
        found, expected = denoiser.prediction(x, i, record.prompts).detach(), record.predictions[i]
        if not torch.equal(found, expected):
            raise Failure(f"step {i} differs by {(found - expected).abs().max().item():.2g}")
    return f"{len(record.states)} steps {denoiser.variant}: error 0"


def ratio(subject: Subject) -> str:
    """Before an update every trained edge has ratio 1, for each stochastic kernel."""
    denoiser, pipe = subject.known, subject.pipe
    policy = FlowPolicy(denoiser, TrainedWeights(pipe, trainable_modules(pipe), "full"), batch=subject.batch)
    prompts, edges = subject.prompts(), 0
    names = [name for name in KERNELS if name != "ode"]
    for name in names:
        kernel = Kernel(name)
        # Rounding dominates the ratio of the last step, and no plan trains this step.
        noisy = [kernel.coefficients(denoiser.sigmas, i).std > 0.0 for i in range(subject.steps - 1)] + [False]
        plan = Plan(denoiser.sigmas, tuple(StepPlan(kernel, trained=True) if on else StepPlan() for on in noisy))
        done = policy.sample(prompts, [11 + k for k in range(len(prompts))], plan)
        experience = Experience(done, plan, tuple(prompts), torch.zeros(0), 1)
        for transitions, batch in experience.batches(0):
            scored = policy.score(experience, transitions, batch)
            if bool(scored.log_ratio.detach().any()):
                worst = float(scored.log_ratio.detach().abs().max())
                raise Failure(f"{name}: log-ratio {worst:.2g} at step {transitions.step}")
            edges += len(scored.node)
    return f"exactly 1 on {edges} edges of {', '.join(names)}"


def decode(subject: Subject) -> str:
    """Final states are decoded to the pipeline's own images or sounds, to the last bit, for one prompt or several."""
    record = subject.record(seed=8)
    found = subject.known.decode(record.final, record.prompts)
    if not torch.equal(found, record.images.float()):
        raise Failure(f"differs by {(found - record.images.float()).abs().max().item():.2g}")
    sounds = found.ndim == 3 and subject.known.sampling_rate is not None
    if not sounds and (found.ndim not in (4, 5) or found.shape[-3] != 3):
        raise Failure(
            f"shape {tuple(found.shape)}; images are [N, 3, H, W], videos [N, F, 3, H, W], and sounds [N, C, S] of an "
            "autoencoder whose configuration has a sampling rate"
        )
    return f"{list(found.shape[1:])}, error 0"


def memory(subject: Subject) -> str:
    """Text encoders can be released when the prompts are encoded, and activations can be recomputed."""
    found = [_released(subject), _checkpointed(subject)]
    if subject.device.type == "cuda":
        found.append(f"peak {torch.cuda.max_memory_allocated(subject.device) / 2**30:.1f} GiB")
    return "; ".join(found)


@torch.no_grad()
def _released(subject: Subject) -> str:
    pipe, x, prompts = subject.pipe, subject.noise(), subject.prompts()
    if not hasattr(pipe, "encode_prompt"):
        return "the class has no encode_prompt to take encoders away from"
    plain = subject.known.velocity(x, 1, prompts)
    with PromptCache(pipe, subject.call) as cache:
        cache.encode(prompts)
        cached = subject.known.velocity(x, 1, prompts)
        freed = sum(_bytes(part) for name, part in pipe.components.items() if name.startswith("text_encoder"))
        cache.release()
        if not torch.equal(subject.known.velocity(x, 1, prompts), cached):
            raise Failure("the prediction differs after the text encoders are released")
    scale, apart = float(plain.abs().max()), float((cached - plain).abs().max())
    if apart > _rounding(subject) * scale:
        raise Failure(f"the prediction for prompts that were encoded one by one differs by {apart:.2g} of {scale:.2g}")
    return f"text encoders released ({_megabytes(freed)})"


def _checkpointed(subject: Subject) -> str:
    modules = trainable_modules(subject.pipe)
    weights = TrainedWeights(subject.pipe, modules, "full")
    with _requiring_grad(list(modules.values())[:1]) as parameters:
        plain = _gradient(subject, parameters)
        try:
            weights.gradient_checkpointing(True)
        except ValueError as reason:
            return f"no gradient checkpointing: {reason}"
        try:
            again = _gradient(subject, parameters)
        finally:
            weights.gradient_checkpointing(False)
    scale = max(float(g.abs().max()) for g in plain)
    apart = max(float((a - b).abs().max()) for a, b in zip(plain, again))
    if scale == 0.0 or apart > _rounding(subject) * scale:
        raise Failure(f"gradient checkpointing changes the gradient, by {apart:.2g} of {scale:.2g}")
    return "same gradient when activations are computed again"


@contextmanager
def _requiring_grad(modules: list[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """The first weight matrices of each module; within the block they require a gradient."""
    chosen = [p for module in modules for p in [p for p in module.parameters() if p.ndim > 1][:4]]
    asked = [parameter.requires_grad for parameter in chosen]
    for parameter in chosen:
        parameter.requires_grad_(True)
    try:
        yield chosen
    finally:
        for parameter, before in zip(chosen, asked):
            parameter.requires_grad_(before)


def _gradient(subject: Subject, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gradient of the weighted velocity at the first step, which the first of two experts predicts."""
    v = subject.known.velocity(subject.noise(), 0, subject.prompts())
    found = torch.autograd.grad((v * subject.noise(9)).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]


def gradient(subject: Subject) -> str:
    """Every trained parameter with an effect gets a gradient, and the gradient is the slope."""
    pipe = subject.fresh() if subject.whole else subject.pipe
    try:
        weights = TrainedWeights.full(pipe) if subject.whole else _random_lora(pipe)
    except ValueError as error:
        raise NotApplicable(f"{error}; check it with --full") from error
    denoiser = subject.on(pipe) if subject.whole else subject.known
    parameters = weights.named_parameters()
    loss, velocities = _weighted(subject, denoiser)
    loss.backward()
    reached = {name: p.grad for name, p in parameters.items() if p.grad is not None and bool(p.grad.any())}
    idle = [parameter for name, parameter in parameters.items() if name not in reached]
    if not reached:
        raise Failure("no parameter gets a gradient")
    if idle:
        _move(idle, 0.1)
        weights.write()
        _, moved = _weighted(subject, denoiser)
        if not all(torch.equal(a, b) for a, b in zip(velocities, moved)):
            cut = [name for name in parameters if name not in reached]
            raise Failure(f"among {', '.join(cut[:3])} ({len(cut)} parameters), some have an effect but no gradient")
    unused = f", {len(idle)} without effect" if idle else ""
    if subject.dtype is not torch.float32:
        return f"{len(reached)} parameters{unused}; no slope can be taken in 16 bits"
    off = _slope_error(subject, denoiser, [parameters[name] for name in reached], list(reached.values()))
    if off > _RELATIVE_SLOPE_ERROR:
        raise Failure(f"the gradient is not the slope: off by {off:.1%}")
    return f"{len(reached)} parameters{unused}; slope off by {off:.2%}"


def _weighted(subject: Subject, denoiser: Denoiser) -> tuple[Tensor, list[Tensor]]:
    """A weighted sum of the velocities of all steps, so that both of two experts take part; and these velocities."""
    terms, velocities = [], []
    for i in range(subject.steps):
        v = denoiser.velocity(subject.noise(i), i, subject.prompts())
        velocities.append(v.detach())
        terms.append((v.double() * subject.noise(20 + i).double()).sum() / v.numel() ** 0.5)
    return torch.stack(terms).sum(), velocities


@torch.no_grad()
def _slope_error(subject: Subject, denoiser: Denoiser, parameters: list[nn.Parameter], along: list[Tensor]) -> float:
    """Relative error of |g| against the central difference in the direction of g, for the best step length."""
    norm = float(torch.stack([g.double().square().sum() for g in along]).sum().sqrt())
    errors = []
    for step in _SLOPE_STEPS:
        sums: list[float] = []
        for distance in (step, -2 * step, step):
            for parameter, g in zip(parameters, along):
                parameter.add_(g, alpha=distance / norm)
            sums.append(float(_weighted(subject, denoiser)[0]) if len(sums) < 2 else 0.0)
        errors.append(abs((sums[0] - sums[1]) / (2 * step) / norm - 1.0))
        if errors[-1] <= _RELATIVE_SLOPE_ERROR:
            break
    return min(errors)


def lora(subject: Subject) -> str:
    """A plain pipeline that loads the saved adapter makes the same prediction and the same pixels.

    peft's layers round more often than the layers of a run, so the pipeline is compared with both. With the layers of
    a run, the prediction may differ by the library's rounding alone, and the pixels not at all. In 16 bits the
    prediction with peft's layers is only reported: some classes enlarge its rounding, Sana to 0.15.
    """
    if subject.whole:
        subject.pipe = None
        subject.pipe = subject.fresh()
    pipe = subject.pipe
    if not subject.whole and not all(
        getattr(module, "peft_config", None) for module in trainable_modules(pipe).values()
    ):
        raise NotApplicable("the gradient check left no adapter")
    try:
        if subject.whole:
            _random_lora(pipe)
        weights = TrainedWeights(pipe, trainable_modules(pipe), "lora")
    except ValueError as error:
        raise NotApplicable(f"no adapter: {error}") from error
    folder = subject.folder / "lora"
    for parameter in weights.parameters():
        # The adapter is saved in float32, but a plain pipeline loads it in the dtype of its base model.
        parameter.data = parameter.data.to(subject.dtype)
    weights.save(folder)
    expected = _trained_velocity(subject, subject.on(pipe))
    pictures = _pictures(subject, pipe)
    subject.pipe = pipe = None
    plain = subject.fresh()
    by = _load_adapter(plain, folder, list(weights.modules))
    theirs = _distance(subject, plain, expected)
    if subject.dtype is torch.float32 and not theirs <= _library_rounding(subject):
        raise Failure(f"the prediction differs after {by} (relative error {theirs:.1e})")
    for module in trainable_modules(plain).values():
        for layer in module.modules():
            add_in_place(layer)
    seen = _same_prediction(subject, plain, expected, by)
    _require_same_pictures(subject, plain, pictures, by)
    peft = "" if theirs == 0.0 else f"; with the layers of peft the prediction differs by {theirs:.1e}"
    return f"{len(weights.parameters())} tensors by {by}: {seen}, same pixels{peft}"


def _load_adapter(pipe: object, folder: object, names: list[str]) -> str:
    """Load the files of `TrainedWeights.save` as its docstring says, and return the name of the loading method."""
    files = ["pytorch_lora_weights.safetensors", *(f"pytorch_lora_weights_{name}.safetensors" for name in names[1:])]
    loader = getattr(pipe, "load_lora_weights", None)
    if loader is None:
        for name, file in zip(names, files):
            getattr(pipe, name).load_lora_adapter(folder, weight_name=file, prefix=None)
        return f"{names[0]}.load_lora_adapter (the class loads no LoRA)"
    loader(folder, weight_name=files[0])
    if len(names) > 1:
        loader(folder, weight_name=files[1], load_into_transformer_2=True)
    return "load_lora_weights"


def saved(subject: Subject) -> str:
    """A plain pipeline that loads all saved weights makes the same pixels, with text encoders or saved without."""
    if not subject.whole:
        raise NotApplicable("takes a copy of the whole pipeline; check it with --full")
    pipe = subject.fresh()
    weights = TrainedWeights.full(pipe)
    _move(weights.parameters(), 0.01)
    weights.write()
    pictures = _pictures(subject, pipe)
    weights.save(subject.folder / "full")
    _require_same_pictures(subject, subject.fresh(subject.folder / "full"), pictures, "from_pretrained")
    if not hasattr(pipe, "encode_prompt"):
        return "by from_pretrained: same pixels; the class has no encode_prompt to take encoders away from"
    weights.source = subject.source
    with PromptCache(pipe, subject.call) as cache:
        cache.encode(subject.prompts())
        cache.release()
        weights.save(subject.folder / "released")
    plain = subject.fresh(subject.folder / "released")
    _require_same_pictures(subject, plain, pictures, "from_pretrained of what was saved without text encoders")
    return "by from_pretrained: same pixels, with text encoders and saved without"


@torch.no_grad()
def _pictures(subject: Subject, pipe: object) -> Tensor:
    """Pictures of a plain call of a pipeline with its own scheduler. The pipeline is frozen, and stays frozen."""
    for part in pipe.components.values():  # type: ignore[attr-defined]
        if isinstance(part, nn.Module):
            # A trained pipeline is frozen in part, and a plain pipeline is not frozen. Torch chooses kernels by this
            # difference, see `TrainedWeights.given`.
            part.requires_grad_(False)
    caller = PipelineCall(pipe, subject.call)
    prompts = company(subject.prompts(), caller.adapter.together)
    generators = [torch.Generator().manual_seed(70 + k) for k in range(len(prompts))]
    scheduler = pipe.scheduler  # type: ignore[attr-defined]
    made = caller.run(scheduler, prompts, subject.steps, output_type="pt", generator=generators)
    return stacked(made, len(prompts)).float().cpu()


def _require_same_pictures(subject: Subject, plain: object, expected: Tensor, by: str) -> None:
    """Require equal pictures, compared as they are shown: with 8 bits for each channel."""
    found = _pictures(subject, plain)
    apart = float((found - expected).abs().max())
    if not torch.equal(_shown(found), _shown(expected)):
        raise Failure(f"the pixels differ after {by}, by {255 * apart:.2g} of 255")
    if float(expected.max() - expected.min()) < 1 / 255:
        raise Failure("the pictures have one colour only, so the comparison shows nothing")


def _shown(pictures: Tensor) -> Tensor:
    return (pictures.clamp(0, 1) * 255).round()


def _same_prediction(subject: Subject, plain: object, expected: Tensor, by: str) -> str:
    """Require the expected prediction of a pipeline that loaded the weights, up to rounding.

    Some CPU libraries round differently if a weight has another address in memory.
    """
    error = _distance(subject, plain, expected)
    if not error <= _library_rounding(subject):
        raise Failure(f"the prediction differs after {by} (relative error {error:.1e})")
    return "same prediction" if error == 0.0 else f"same prediction to rounding ({error:.1e})"


def _library_rounding(subject: Subject) -> float:
    return min(_rounding(subject), 64 * torch.finfo(subject.dtype).eps)


def _distance(subject: Subject, pipe: object, expected: Tensor) -> float:
    """Largest difference of a pipeline's prediction to the expected prediction, relative to the largest value."""
    found = _trained_velocity(subject, subject.on(pipe))
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def _trained_velocity(subject: Subject, denoiser: Denoiser) -> Tensor:
    """Velocities at the first step and at the last step, so that both of two experts take part."""
    steps = (0, subject.steps - 1)
    return torch.stack([denoiser.velocity(subject.noise(), i, subject.prompts()) for i in steps])


def _random_lora(pipe: object) -> TrainedWeights:
    weights = TrainedWeights.lora(pipe, LoraSpec(rank=2, alpha=4), seed=0)
    # B starts at 0, so without this move A would have no gradient and the adapter no effect.
    _move(weights.parameters(), 0.05)
    weights.write()
    return weights


@torch.no_grad()
def _move(parameters: list[nn.Parameter], scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(drawn, alpha=scale)


def _rounding(subject: Subject) -> float:
    return _ROUNDING.get(subject.dtype, _ROUNDING[torch.float32])


def _bytes(part: object) -> int:
    return sum(p.numel() * p.element_size() for p in part.parameters()) if isinstance(part, nn.Module) else 0


def _megabytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "probe": probe,
    "velocity": velocity,
    "replay": replay,
    "ratio": ratio,
    "decode": decode,
    "given": given,
    "memory": memory,
    "gradient": gradient,
    "lora": lora,
    "saved": saved,
}
