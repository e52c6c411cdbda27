"""Context parallelism: several processes evaluate one sample, and each holds a part of its tokens.

A video of 50,000 tokens has activations that no card holds. Between attentions, the layers of a transformer treat each
token by itself, so a process needs only its own tokens there. For attention, the processes exchange tokens for heads:
each then has all tokens of some heads (Ulysses, 2309.14509, section 3). diffusers does this (`_cp_plan` of a class).

Every process of a group gets the whole prediction, the same to the last bit. In a backward pass it keeps the part of
the gradient that passes through its own tokens. So the gradient of a trained weight is the sum over the group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SPLIT", "split_tokens"]

SPLIT = (
    "ChronoEditTransformer3DModel", "Flux2Transformer2DModel", "FluxTransformer2DModel", "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)  # fmt: skip
"""The classes whose predictions and gradients were compared with one process's, in float32.

LTX-Video and LTX-2 have a plan in diffusers 0.42, but their calls fail: the masks and positions do not fit."""
TEXT, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
MASKED = ("QwenImageTransformer2DModel",)
"""Classes that take texts of any length with a mask, so that a text may be made longer."""
CLOSE = {torch.float32: 1e-4}
HALF_CLOSE = 0.05
"""How far the prediction of parts may be from the prediction of the whole, as a share of its norm."""


def split_tokens(modules: Mapping[str, nn.Module], degree: int) -> None:
    """Let `degree` processes of consecutive ranks evaluate a denoiser's samples together. Every process must call it.

    All processes of a group must make the same calls, in the same order and with the same inputs. The first call of
    each denoiser is also made whole, without gradients, and the two predictions are compared.

    Call it when adapters and attention backends are in place.

    Args:
        modules: component name -> denoiser.
        degree: number of processes of a group, 2 or more; it divides the number of all processes.

    Raises:
        ValueError: a denoiser cannot be split so; or later, in a call: its tokens do not divide, or the predictions
            differ.
    """
    for name, module in modules.items():
        _check(name, module, degree)
    # Imported only here: the module of meshes loads for a second, and few runs need it.
    from torch.distributed.device_mesh import init_device_mesh

    device = next(next(iter(modules.values())).parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size() // degree, degree), mesh_dim_names=("data", "ulysses"))
    for name, module in modules.items():
        _begin_with_comparison(name, module, mesh["ulysses"])


def _check(name: str, module: nn.Module, degree: int) -> None:
    """Raise ValueError if a denoiser cannot be split over `degree` processes."""
    kind = _kind(module)
    plan: Any = getattr(module, "_cp_plan", None)
    masked = kind not in MASKED or any(isinstance(part, dict) and MASK in part for part in (plan or {}).values())
    if kind not in SPLIT or plan is None or not masked:
        raise ValueError(
            f"model.context_parallel splits {', '.join(SPLIT)}, and the {name} is of class {kind}, or diffusers is too "
            "old for it; leave model.context_parallel out"
        )
    heads = module.config.num_attention_heads  # type: ignore[union-attr]
    if heads % degree:
        raise ValueError(
            f"model.context_parallel is {degree}, and the {name} has {heads} heads of attention, which processes share "
            f"in equal parts; use a divisor of {heads}"
        )
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for processor in _processors(module):
        given = processor._attention_backend
        active = _AttentionBackendRegistry.get_active_backend()[0] if given is None else AttentionBackendName(given)
        if not _AttentionBackendRegistry._is_context_parallel_available(active):
            raise ValueError(
                f"attention backend {active.value} of diffusers does not work with model.context_parallel; write "
                "model.attention: native"
            )


def _kind(module: nn.Module) -> str:
    """The name of a denoiser's class. FSDP2 puts a class of its own before it."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((name for name in names if name in SPLIT), names[0])


def _processors(module: nn.Module) -> list[Any]:
    """The attention processors that diffusers tells of a split."""
    found = [getattr(part, "processor", None) for part in module.modules()]
    return [one for one in found if hasattr(one, "_parallel_config") and hasattr(one, "_attention_backend")]


def _begin_with_comparison(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the first call of a denoiser whole and in parts, and all later calls in parts."""
    own = module.forward

    def first(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            whole = own(*args, **kwargs)
        module.forward = own  # type: ignore[method-assign]
        _apply(module, mesh)
        made = module.forward(*args, **kwargs)
        for expected, found in zip(_tensors(whole), _tensors(made), strict=True):
            _require_close(name, expected, found.detach())
        return made

    module.forward = wraps(own)(first)  # type: ignore[method-assign]


def _apply(module: nn.Module, mesh: DeviceMesh) -> None:
    """Put diffusers' hooks into a denoiser.

    Its `enable_parallelism` does this too, but needs an accelerator, and knows one group of all processes only.
    """
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ParallelConfig

    # diffusers calls a function of torch by its former name.
    warnings.filterwarnings("ignore", "`torch.distributed._functional_collectives", FutureWarning)
    config = ContextParallelConfig(ulysses_degree=mesh.size())
    config._ulysses_mesh = config._flattened_mesh = mesh
    config._rank, config._world_size = mesh.get_local_rank(), mesh.size()
    for processor in _processors(module):
        processor._parallel_config = ParallelConfig(context_parallel_config=config)
    apply_context_parallel(module, config, module._cp_plan)
    module.forward = _in_parts(module, module.forward, mesh)  # type: ignore[method-assign]


def _in_parts(module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    degree = mesh.size()

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _kind(module) in MASKED:
            kwargs = _longer(kwargs, degree)
        args, kwargs = tree_map_only(Tensor, lambda given: _shared(given, mesh), (args, kwargs))
        try:
            return forward(*args, **kwargs)
        except AssertionError as error:
            if "divisible" not in str(error):
                raise
            shapes = {key: list(given.shape) for key, given in kwargs.items() if isinstance(given, Tensor)}
            raise ValueError(
                f"model.context_parallel is {degree}, and the tokens of a call of {_kind(module)} do not "
                f"divide into so many equal parts (shapes: {shapes}); change model.call (height, width, num_frames, "
                "max_sequence_length) or model.context_parallel"
            ) from error

    return call


def _longer(kwargs: dict[str, Any], degree: int) -> dict[str, Any]:
    """The arguments of a call with texts whose tokens divide. The mask hides what is added."""
    text: Tensor = kwargs[TEXT]
    lacking = -text.shape[1] % degree
    if not lacking:
        return kwargs
    mask = kwargs.get(MASK)
    mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask
    return kwargs | {
        TEXT: nn.functional.pad(text, (0, 0, 0, lacking)),
        MASK: nn.functional.pad(mask, (0, lacking)),
    }


class _SumGradient(torch.autograd.Function):
    """The identity. In the backward pass, the sum of the gradients of a group."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        slope = slope.contiguous().clone()
        dist.all_reduce(slope, group=ctx.mesh.get_group())
        return slope, None


def _shared(given: Tensor, mesh: DeviceMesh) -> Tensor:
    """An input of a denoiser, whose gradient every process gets whole: a reward's passes through several steps."""
    if not (torch.is_grad_enabled() and given.requires_grad):
        return given
    shared: Tensor = _SumGradient.apply(given, mesh)  # type: ignore[no-untyped-call]
    return shared


def _tensors(made: Any) -> list[Tensor]:
    values = made.values() if hasattr(made, "values") else made if isinstance(made, (tuple, list)) else [made]
    return [one for one in values if isinstance(one, Tensor)]


def _require_close(name: str, expected: Tensor, found: Tensor) -> None:
    far = ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12)).item()
    limit = CLOSE.get(expected.dtype, HALF_CLOSE)
    if not far <= limit:
        raise ValueError(
            f"with model.context_parallel the {name} predicts something else than whole: the difference is {far:.2g} "
            f"of its norm, and {limit:g} would be rounding; leave model.context_parallel out"
        )
