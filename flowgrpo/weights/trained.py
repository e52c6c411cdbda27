"""The trained part of a diffusers pipeline: a LoRA adapter, or all weights of the denoiser.

The denoiser is `pipe.transformer`, and `pipe.transformer_2` too in two-expert pipelines (Wan 2.2), or `pipe.unet`.
Results are written in diffusers' own formats (`saving.py`). `averages.py` has moving averages of trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .averages import Ema
from .borrowing import exchanging, replaced
from .collective import Lockstep
from .lora import LoraSpec, target_layers
from .masters import Masters
from .pipeline_classes import adapter_of
from .precision import cast_base
from .saving import load_lora, new_folder, save_lora, save_pipeline
from .sharding import Shards, cut_as, whole

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from typing_extensions import Self

__all__ = ["Ema", "LoraSpec", "TrainedWeights", "cast_base", "trainable_modules"]

MODULE_NAMES = ("transformer", "transformer_2", "unet")
ADAPTER = "default"


def trainable_modules(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The denoisers of a pipeline by component name: `transformer`, and `transformer_2` where there is one, or `unet`.

    Raises:
        ValueError: the pipeline has none.
    """
    modules = {name: getattr(pipe, name, None) for name in MODULE_NAMES}
    found = {name: module for name, module in modules.items() if isinstance(module, nn.Module)}
    if not found:
        others = sorted(name for name, part in pipe.components.items() if isinstance(part, nn.Module))
        raise ValueError(
            f"{type(pipe).__name__} has no `transformer` or `unet` to train (modules: {', '.join(others) or 'none'}); "
            "load it with its denoiser, or use a pipeline that has one"
        )
    return found


class TrainedWeights:
    """The trained part of a pipeline; made by `TrainedWeights.lora` or `TrainedWeights.full`.

    Everything else in the pipeline is frozen. Parameters are looked up by name on every use, so wrappers that
    replace parameter objects in place (FSDP2) are followed.

    Attributes:
        kind: "lora" or "full".
        pipe: the pipeline.
        modules: component name -> denoiser.
        source: folder that the pipeline was loaded from, for `save` of full weights; None if it was made in memory.
        shards: how full weights are shared out to several processes; None where each has them whole.
        steps: keeps processes in step that need each other for a backward pass; None where each has its own.
    """

    def __init__(
        self,
        pipe: Any,
        modules: dict[str, nn.Module],
        kind: Literal["lora", "full"],
        shards: Shards | None = None,
        source: str | Path | None = None,
        masters: bool = False,
    ) -> None:
        self.pipe = pipe
        self.modules = modules
        self.kind = kind
        self._names = {
            key: [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            for key, module in modules.items()
        }
        self.source = source
        self._had = {name: type(part) for name, part in pipe.components.items() if part is not None}
        self.shards = shards
        self.steps: Lockstep | None = None if shards is None else shards.steps
        self._masters = Masters(self._computing()) if masters else None
        self._reference: list[Tensor] | None = None
        exchange = exchanging if shards is None else shards.steps.exchange
        self._in_reference = False
        self._as_reference = exchange(partial(self._switch_reference, True), partial(self._switch_reference, False))

    @classmethod
    def lora(
        cls,
        pipe: Any,
        spec: LoraSpec,
        *,
        seed: int,
        param_dtype: torch.dtype = torch.float32,
        modules: dict[str, nn.Module] | None = None,
    ) -> Self:
        """Freeze the pipeline and add one trainable LoRA adapter to each denoiser.

        Args:
            pipe: any pipeline with a `transformer` or `unet`, without adapters.
            spec: rank, scale and target layers.
            seed: of the initial A matrices. Global random state is neither read nor changed.
            param_dtype: dtype of A and B; float32 also on a half-precision base, as updates of 1e-4 relative
                size vanish in bfloat16.
            modules: what of `pipe.components` is trained, by name; None takes the denoisers.

        Raises:
            ValueError: no layer matches `spec.targets`, or the module has an adapter or takes none.
        """
        modules = trainable_modules(pipe) if modules is None else modules
        targets = {key: target_layers(key, module, spec) for key, module in modules.items()}
        _freeze(pipe)
        # Only the CPU generator: peft draws A there before moving it, and torch.manual_seed would also reseed
        # every accelerator, which fork_rng(devices=[]) does not restore.
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            for key, module in modules.items():
                config = LoraConfig(
                    r=spec.rank,
                    lora_alpha=spec.alpha,
                    target_modules=targets[key],
                    init_lora_weights="gaussian" if spec.init == "gaussian" else True,
                    lora_dropout=spec.dropout,
                )
                module.add_adapter(config, adapter_name=ADAPTER)
        for module in modules.values():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(param_dtype)
        return cls(pipe, modules, "lora")

    @classmethod
    def full(
        cls,
        pipe: Any,
        *,
        keep_reference: bool = False,
        modules: dict[str, nn.Module] | None = None,
        shard: Callable[[dict[str, nn.Module]], Shards] | None = None,
        source: str | Path | None = None,
    ) -> Self:
        """Train every weight of each denoiser; freeze the rest of the pipeline.

        Args:
            pipe: any pipeline with a `transformer` or `unet`. Weights in half precision stay as they are; the trained
                parameters are float32 copies of them, see `masters.py`.
            keep_reference: keep a copy of the present weights, for `reference()`. It doubles their memory.
            modules: what of `pipe.components` is trained, by name; None takes the denoisers.
            shard: cuts the modules into shards, and puts those on the device.
            source: local folder that the pipeline was loaded from; `save` takes the untrained components from there,
                so that they may be released meanwhile.
        """
        modules = trainable_modules(pipe) if modules is None else modules
        _freeze(pipe)
        for module in modules.values():
            module.requires_grad_(True)
        weights = cls(pipe, modules, "full", None if shard is None else shard(modules), source, masters=shard is None)
        if keep_reference:
            weights._reference = [parameter.detach().clone() for parameter in weights._computing().values()]
        return weights

    @classmethod
    def given(cls, pipe: Any, kind: Literal["lora", "full"]) -> Self:
        """A pipeline to sample from as it is, with the arithmetic that a run of such a kind begins with.

        What such a run freezes is frozen. By whether a weight can have a gradient torch chooses how it multiplies, even
        where none is asked for: `linear` of an input that is not contiguous is one product, or one for each row.
        """
        modules = trainable_modules(pipe)
        trained = {id(p) for module in modules.values() for p in module.parameters()} if kind == "full" else set()
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                for parameter in part.parameters():
                    if id(parameter) not in trained:
                        parameter.requires_grad_(False)
        return cls(pipe, modules, kind)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters, or their shards, by name: `transformer.<name within the module>`, in a fixed order.

        If full weights compute in half precision, these are their float32 masters. Call `write` after changing them.
        """
        return self._computing() if self._masters is None else dict(self._masters.named)

    def write(self) -> None:
        """Let the modules compute with the present values of `named_parameters`, rounded if they are masters."""
        if self._masters is not None:
            self._masters.write()

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Gradients of a loss with respect to `parameters`, in float32; None for parameters without an effect."""
        found = torch.autograd.grad(loss, list(self._computing().values()), allow_unused=True)
        return [gradient if gradient is None else gradient.float() for gradient in found]

    def _computing(self) -> dict[str, nn.Parameter]:
        """The parameters that the modules compute with, or their shards, by name."""
        if self.steps is not None:
            self.steps.release()
        return {
            f"{key}.{name}": module.get_parameter(name)
            for key, module in self.modules.items()
            for name in self._names[key]
        }

    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters, in the order of `named_parameters`."""
        return list(self.named_parameters().values())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the pipeline is the reference model; it may be nested.

        LoRA: the adapter is off. Full: the weights kept by `keep_reference=True` are exchanged, in place and
        bitwise, with the trained ones. Run no backward pass in it: a checkpointed graph would recompute with
        the wrong weights.

        Raises:
            ValueError: full weights without a kept copy.
        """
        if self.kind == "full" and self._reference is None:
            raise ValueError(
                "no reference weights were kept: write TrainedWeights.full(pipe, keep_reference=True), or "
                "use LoRA, whose reference needs no memory"
            )
        if self._in_reference:
            yield
            return
        with self._as_reference():
            yield

    def _switch_reference(self, on: bool) -> None:
        self._in_reference = on
        if self._reference is not None:
            # In place, one tensor at a time: sharding wrappers and optimizers hold on to the storage.
            for parameter, kept in zip(self._computing().values(), self._reference, strict=True):
                current = parameter.detach().clone()
                parameter.data.copy_(kept)
                kept.copy_(current)
            return
        # As `disable_adapters` and `enable_adapters` of diffusers, which look up the version of peft at each call.
        for module in self.modules.values():
            for layer in module.modules():
                if isinstance(layer, BaseTunerLayer):
                    layer.enable_adapters(not on)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the trained tensors on the CPU, by the names of `named_parameters`.

        Of shards all processes must call it; the first has the tensors.
        """
        return {name: whole(p) for name, p in self.named_parameters().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy tensors into the trained parameters, all or none.

        Args:
            state: as from `state_dict`.
            strict: False leaves parameters without an entry as they are, and ignores entries without a
                parameter.

        Raises:
            ValueError: missing or unexpected names (strict), or a shape that differs (always).
        """
        parameters = self.named_parameters()
        faults = []
        if strict and (missing := [name for name in parameters if name not in state]):
            faults.append(f"missing: {_listed(missing)}")
        if strict and (unexpected := [name for name in state if name not in parameters]):
            faults.append(f"unexpected: {_listed(unexpected)}")
        common = {name: (p, state[name]) for name, p in parameters.items() if name in state}
        shapes = [
            f"{name}: {list(tensor.shape)} given, {list(p.shape)} needed"
            for name, (p, tensor) in common.items()
            if tensor.shape != p.shape
        ]
        if shapes:
            faults.append(f"shape of {_listed(shapes, most=2)}")
        if faults:
            raise ValueError(
                f"these are not the trained weights of this {type(self.pipe).__name__} ({self.kind}): "
                + "; ".join(faults)
                + "; give the state saved with the same model, targets and rank"
            )
        for parameter, tensor in common.values():
            parameter.data.copy_(cut_as(parameter, tensor))
        self.write()

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss; of what processes hold together, with the others."""
        if self.steps is None:
            loss.backward()
        else:
            self.steps.backward(loss)

    def meet(self) -> None:
        """Return once no process needs another for a backward pass or for weights. All must call it."""
        if self.steps is not None:
            self.steps.meet()

    @contextmanager
    def in_one_place(self) -> Iterator[None]:
        """Within this context the first process has the pipeline with whole modules on the CPU, so that it can `save`.

        All processes must enter it. Without shards nothing happens.
        """
        if self.shards is None:
            yield
            return
        sharded = self.modules
        self.modules = self.shards.whole_modules() or sharded
        try:
            with replaced(self.pipe, **self.modules):
                yield
        finally:
            self.modules = sharded

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the trained weights in diffusers' own format; the folder appears whole or not at all.

        LoRA: `pytorch_lora_weights.safetensors` with rank and alpha in its metadata, for
        `pipe.load_lora_weights(folder)`. A second expert has its own file, for
        `pipe.load_lora_weights(folder, weight_name="pytorch_lora_weights_transformer_2.safetensors",
        load_into_transformer_2=True)`. Where the pipeline class loads no LoRA, its denoiser does, by
        `pipe.transformer.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors",
        prefix=None)`.

        Full: a complete pipeline folder, for `from_pretrained(folder)`, with the arguments that `source` itself wants
        (None for each component that is left out there). Untrained components are copied from `source`; without a
        `source` the pipeline's own are written.

        Args:
            folder: to create.
            overwrite: replace an existing folder.

        Raises:
            ValueError: the folder exists and `overwrite` is off, `source` is no complete pipeline folder, or there is
                no source and components have been released since (`pipe.text_encoder = None`).
        """
        with new_folder(folder, overwrite=overwrite) as target:
            if self.kind == "lora":
                save_lora(self.pipe, self.modules, ADAPTER, target)
            else:
                save_pipeline(self.pipe, self.modules, target, had=self._had, source=self.source)

    def load_lora(self, folder: str | Path) -> None:
        """Take the adapter that `save` wrote, to the last bit: plain diffusers rounds it to the dtype of its base.

        Raises:
            ValueError: a file is missing, or it is of other layers or another rank.
        """
        load_lora(self.modules, ADAPTER, Path(folder))

    def gradient_checkpointing(self, on: bool) -> None:
        """Recompute activations in the backward pass instead of keeping them: same gradients, less memory.

        Raises:
            ValueError: the module does not support it, or would make another prediction with it.
        """
        if on and (reason := adapter_of(self.pipe).recompute):
            raise ValueError(f"{reason}; turn gradient_checkpointing off")
        for module in self.modules.values():
            if on:
                module.enable_gradient_checkpointing(_recomputed)
            else:
                module.disable_gradient_checkpointing()


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The library's own function takes no keyword arguments, which some of its blocks are called with.
    return checkpoint(block.__call__, *args, use_reentrant=False, **kwargs)


def _freeze(pipe: Any) -> None:
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
