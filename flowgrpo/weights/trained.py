"""The trained part of a diffusers pipeline: a LoRA adapter, or all weights of the denoiser.

The denoiser is `pipe.transformer` or `pipe.unet`. Pipelines with two experts (Wan 2.2) also have `pipe.transformer_2`.
Results are written in diffusers' own formats (`saving.py`). `averages.py` has moving averages of trained weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .adapter_files import StartAdapter, put_start
from .adapters import ADAPTER, choose_adapter, put_adapters, switch_adapters
from .averages import Ema
from .borrowing import exchanging, replaced
from .collective import Lockstep
from .lora import LoraSpec, target_layers
from .loss_scale import LossScale, in_float16
from .masters import Masters
from .merging import merge_adapters
from .pieces import cut_as, whole
from .pipeline_classes import adapter_of
from .pipeline_folders import DENOISERS
from .precision import cast_base
from .saving import load_lora, new_folder, save_lora, save_modules, save_pipeline, untrained_parts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from typing_extensions import Self

    from .sharding import Shards

__all__ = ["Ema", "LoraSpec", "TrainedWeights", "cast_base", "trainable_modules"]


def trainable_modules(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The denoisers that a pipeline has, by component name: `transformer`, `transformer_2`, `unet`.

    Raises:
        ValueError: the pipeline has no denoiser.
    """
    modules = {name: getattr(pipe, name, None) for name in DENOISERS}
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

    Everything else in the pipeline is frozen. Parameters are looked up by name at each use, so that a wrapper may
    replace parameter objects in place (FSDP2).

    Attributes:
        kind: "lora" or "full".
        pipe: the pipeline.
        modules: component name -> denoiser.
        source: folder from which the pipeline was loaded, for `save` of full weights; None if it was made in memory.
        shards: how full weights, or the frozen weights of a LoRA, are distributed over several processes; None if
            each process has them whole.
        steps: keeps processes in step that need each other for a backward pass; None if no process needs another.
        whole_teachers: the names of the teachers that have denoisers of their own.
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
        self._scale: LossScale | None = None
        if masters and any(map(in_float16, modules.values())):
            self._scale = LossScale(modules, self._computing().values())
        self._masters = Masters(self._computing(), self._scale) if masters else None
        self._reference: list[Tensor] | None = None
        exchange = exchanging if shards is None else shards.steps.exchange
        self._in_reference = False
        self._teachers: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        self.whole_teachers: set[str] = set()
        self._as_reference = exchange(partial(self._switch_reference, True), partial(self._switch_reference, False))

    @classmethod
    def lora(
        cls,
        pipe: Any,
        spec: LoraSpec,
        *,
        seed: int,
        modules: dict[str, nn.Module] | None = None,
        shard: Callable[[dict[str, nn.Module]], Shards] | None = None,
    ) -> Self:
        """Freeze the pipeline and add one trainable LoRA adapter to each denoiser.

        Args:
            pipe: any pipeline with a `transformer` or `unet`, without adapters.
            spec: rank, scale, target layers, and the type of the arithmetic. If A and B compute in 16 bits, the trained
                parameters are float32 copies of them, see `masters.py`.
            seed: of the initial A matrices. Global random state is neither read nor changed.
            modules: the components of the pipeline that are trained, by name; None means the denoisers.
            shard: cuts the frozen weights of the modules into shards, and puts the modules on the device. Losses are
                then not scaled, so the modules must not be in float16.

        Raises:
            ValueError: no layer matches `spec.targets`, the module already has an adapter, or it takes no adapter.
        """
        modules = trainable_modules(pipe) if modules is None else modules
        targets = {key: target_layers(key, module, spec) for key, module in modules.items()}
        _freeze(pipe)
        put_adapters(modules, targets, spec, seed)
        return cls(pipe, modules, "lora", None if shard is None else shard(modules), masters=True)

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
            keep_reference: keep a copy of the present weights, for `reference()`. The copy doubles their memory.
            modules: the components of the pipeline that are trained, by name; None means the denoisers.
            shard: cuts the modules into shards, and puts the shards on the device. Losses are then not scaled, so
                the modules must not be in float16.
            source: local folder from which the pipeline was loaded. `save` copies the untrained components from there,
                so that they may be released during training.
        """
        modules = trainable_modules(pipe) if modules is None else modules
        _freeze(pipe)
        for module in modules.values():
            module.requires_grad_(True)
        weights = cls(pipe, modules, "full", None if shard is None else shard(modules), source, masters=shard is None)
        if keep_reference:
            weights.keep_reference()
        return weights

    @classmethod
    def given(cls, pipe: Any, kind: Literal["lora", "full"]) -> Self:
        """A pipeline to sample from without training, with the same arithmetic as at the start of a run of this kind.

        The parameters that a run of this kind freezes are frozen here too. This matters because torch chooses how to
        multiply by whether a weight can have a gradient, even if no gradient is requested. For example, `linear` of a
        non-contiguous input is computed as one product, or as one product for each row.
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

        If the weights compute in half precision, these are their float32 masters. Call `write` after changing them.
        """
        return self._computing() if self._masters is None else dict(self._masters.named)

    def write(self) -> None:
        """Let the modules compute with the present values of `named_parameters`, rounded if they are masters."""
        if self._masters is not None:
            self._masters.write()

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Gradients of a loss with respect to `parameters`, in float32; None for parameters without an effect."""
        parameters, factor = list(self._computing().values()), 1.0
        if self._scale is None:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        else:
            with self._scale.scaled(loss) as scaled:
                found, factor = torch.autograd.grad(scaled, parameters, allow_unused=True), self._scale.factor
        # A parameter in float32 divides its gradient by itself.
        divisors = [1.0 if parameter.dtype == torch.float32 else factor for parameter in parameters]
        pairs = zip(found, divisors, strict=True)
        return [None if g is None else g.float() if divisor == 1.0 else g.float() / divisor for g, divisor in pairs]

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Within this context an adapter has its trained float32 numbers, for files. No model may be called in it."""
        if self.kind == "full" or self._masters is None:
            yield
            return
        with self._masters.in_place():
            yield

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

    def keep_reference(self, others: Mapping[str, nn.Module] | None = None) -> None:
        """Keep a copy of weights for `reference()`: the present weights, or the weights of other denoisers.

        Args:
            others: denoisers like the trained ones, by the same names.
        """
        if others is None:
            self._reference = [parameter.detach().clone() for parameter in self._computing().values()]
            return
        kept = [others[key].get_parameter(name) for key in self.modules for name in self._names[key]]
        pairs = zip(kept, self._computing().values(), strict=True)
        self._reference = [parameter.detach().to(own.device, own.dtype, copy=True) for parameter, own in pairs]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the pipeline is the reference model; the context may be nested.

        LoRA: the adapter is off. Full weights, and a LoRA that began from another: the weights kept by
        `keep_reference=True` or `start_from` are exchanged, in place and bitwise, with the trained weights. Run no
        backward pass within the context, because a checkpointed graph would recompute with the wrong weights.

        Raises:
            ValueError: full weights are trained and no copy was kept.
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
            # In place, because sharding wrappers and optimizers refer to the storage; one tensor at a time, to save
            # memory.
            for parameter, kept in zip(self._computing().values(), self._reference, strict=True):
                current = parameter.detach().clone()
                parameter.data.copy_(kept)
                kept.copy_(current)
            return
        switch_adapters(self.modules, not on)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the trained tensors on the CPU, by the names of `named_parameters`.

        If the weights are sharded, all processes must call this method, and only the first process gets the tensors.
        """
        return {name: whole(p) for name, p in self.named_parameters().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy tensors into the trained parameters, all or none.

        Args:
            state: a result of `state_dict`.
            strict: with False, parameters without an entry stay unchanged, and entries without a parameter are
                ignored.

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
                + "; give a state that was saved with the same model, targets and rank"
            )
        for parameter, tensor in common.values():
            parameter.data.copy_(cut_as(parameter, tensor))
        self.write()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss; if processes hold the weights together, they run it together."""
        if self.steps is not None:
            self.steps.backward(loss)
        elif self._scale is None:
            loss.backward()
        else:
            with self._scale.scaled(loss) as scaled:
                scaled.backward()

    @property
    def loss_factor(self) -> float:
        """The factor by which the backward pass that runs now scales a loss; 1 unless a module computes in float16."""
        return 1.0 if self._scale is None else self._scale.factor

    def meet(self) -> None:
        """Return when no process needs another for a backward pass or for weights. All processes must call this."""
        if self.steps is not None:
            self.steps.meet()

    @contextmanager
    def in_one_place(self) -> Iterator[None]:
        """Within this context the first process has the pipeline with whole modules on the CPU, so that it can `save`.

        All processes must enter this context. Without shards, and for a LoRA, it does nothing.
        """
        if self.shards is None or self.kind == "lora":
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
        """Write the trained weights in diffusers' own format. The folder appears only when it is complete.

        LoRA: `pytorch_lora_weights.safetensors` with rank and alpha in its metadata, for
        `pipe.load_lora_weights(folder)`. A second expert has its own file, for
        `pipe.load_lora_weights(folder, weight_name="pytorch_lora_weights_transformer_2.safetensors",
        load_into_transformer_2=True)`. If the pipeline class cannot load a LoRA, load it into the denoiser, with
        `pipe.transformer.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors",
        prefix=None)`.

        Full: a complete pipeline folder, for `from_pretrained(folder)`. If `source` needs further arguments (None for
        each component that is left out there), the new folder needs them too. Untrained components are copied from
        `source`. Without a `source`, the pipeline's own components are written.

        Args:
            folder: to create.
            overwrite: replace an existing folder.

        Raises:
            ValueError: the folder exists and `overwrite` is off, `source` is not a complete pipeline folder, or there
                is no source and components have been released (`pipe.text_encoder = None`).
        """
        with new_folder(folder, overwrite=overwrite) as target, self.exact():
            self._write(target)

    def _write(self, folder: Path) -> None:
        if self.kind == "lora":
            save_lora(self.pipe, self.modules, ADAPTER, folder)
        else:
            save_pipeline(self.pipe, self.modules, folder, had=self._had, source=self.source)

    def merge(self, source: str | Path | None = None) -> None:
        """Add the LoRA into the weights of its modules. Only `save` may be called afterwards; it writes full weights.

        Args:
            source: as in `full`.
        """
        with self.exact():
            for module in self.modules.values():
                merge_adapters(module)
        self.kind, self.source = "full", source

    def keep(self, folder: str | Path) -> None:
        """Write what `save` would write now, for `save_kept`, but without the components that the source has.

        An existing folder is replaced.

        Raises:
            ValueError: as in `save`.
        """
        with new_folder(folder, overwrite=True) as target, self.exact():
            if self._completed_by is None:
                self._write(target)
            else:
                untrained_parts(self._completed_by, set(self.modules), type(self.pipe))  # refused before it is needed
                save_modules(self.modules, target)

    def save_kept(self, kept: str | Path, folder: str | Path) -> None:
        """Write the folder that `save` would have written when `keep` was called. An existing folder is replaced.

        Raises:
            ValueError: as in `save`.
        """
        with new_folder(folder, overwrite=True) as target:
            if self._completed_by is None:
                shutil.copytree(kept, target, dirs_exist_ok=True)
            else:
                whole = {"source": self._completed_by, "kept": Path(kept)}
                save_pipeline(self.pipe, self.modules, target, had=self._had, **whole)

    @property
    def _completed_by(self) -> Path | None:
        """The folder that has the untrained components; None if the trained weights are written without others."""
        return None if self.kind == "lora" or self.source is None else Path(self.source)

    def load_lora(self, folder: str | Path) -> None:
        """Load the adapter that `save` wrote, to the last bit. Plain diffusers would round it to the base's dtype.

        Raises:
            ValueError: a file is missing, or its layers or its rank differ from the adapter.
        """
        with self.exact():
            load_lora(self.modules, ADAPTER, Path(folder))

    def start_from(self, start: StartAdapter) -> None:
        """Give the new adapters the numbers of an existing LoRA, which is the reference from now on.

        Raises:
            ValueError: the LoRA does not fit the adapters.
        """
        with self.exact():
            put_start(self.modules, ADAPTER, start)
        self.keep_reference()

    def add_whole_teacher(self, name: str, modules: Mapping[str, nn.Module]) -> None:
        """Add frozen denoisers that take the place of the trained ones for `teacher`.

        Args:
            name: by which `teacher` knows them.
            modules: as many as are trained, by the same names, on the same device. Several teachers may share them.

        Raises:
            ValueError: the names differ from the trained modules' names.
        """
        if set(modules) != set(self.modules):
            raise ValueError(
                f"the teacher has the denoisers {', '.join(modules)}, and the pipeline has {', '.join(self.modules)}; "
                "use a teacher with the same denoisers"
            )
        for module in modules.values():
            # No gradient is ever asked for. But torch chooses how to multiply by whether a weight can have one, and a
            # teacher that equals the policy must predict the same to the last bit.
            module.requires_grad_(self.kind == "full")
        self._teachers[name] = partial(replaced, self.pipe, **modules)
        self.whole_teachers.add(name)

    def add_teacher(self, name: str, teacher: StartAdapter, compute: Literal["base", "float32"] = "base") -> None:
        """Add a frozen LoRA beside the trained one, for `teacher`. It may have a rank and layers of its own.

        Args:
            name: by which `teacher` knows it.
            teacher: the LoRA in its files.
            compute: see `LoraSpec`.

        Raises:
            ValueError: all weights are trained, or the LoRA does not fit the modules.
        """
        if self.kind != "lora":
            raise ValueError("a LoRA teaches beside a trained LoRA, and all weights are trained; train a LoRA")
        for key, module in self.modules.items():
            known = {layer for layer, _ in module.named_modules()}
            if odd := [layer for layer in teacher.layers if layer not in known]:
                raise ValueError(
                    f"{teacher.files[0]} does not fit {key} ({type(module).__name__}), which has no layer {odd[0]}; "
                    "use a LoRA of this model"
                )
        # No name begins another, because peft looks for a name within the names of tensors.
        adapter = f"teacher_{len(self._teachers):03}"
        spec = LoraSpec(teacher.rank, teacher.alpha, teacher.layers, compute=compute)
        put_adapters(self.modules, {key: list(teacher.layers) for key in self.modules}, spec, 0, adapter)
        put_start(self.modules, adapter, teacher)
        choose_adapter(self.modules, ADAPTER)
        choose = partial(choose_adapter, self.modules)
        self._teachers[name] = exchanging(partial(choose, adapter), partial(choose, ADAPTER))

    @contextmanager
    def teacher(self, name: str) -> Iterator[None]:
        """Within this context the pipeline is the teacher of this name; without one, the model of the start.

        Run no backward pass within the context, as in `reference`.
        """
        with self._teachers[name]() if name in self._teachers else self.reference():
            yield

    def gradient_checkpointing(self, on: bool) -> None:
        """Recompute activations in the backward pass instead of keeping them: same gradients, less memory.

        Raises:
            ValueError: the module does not support gradient checkpointing, or its prediction would change.
        """
        if on and (reason := adapter_of(self.pipe).recompute):
            raise ValueError(f"{reason}; turn gradient_checkpointing off")
        for module in self.modules.values():
            if on and not getattr(module, "_supports_gradient_checkpointing", True):
                raise ValueError(
                    f"the class {type(module).__name__} of diffusers cannot evaluate its blocks a second time; write "
                    "model.gradient_checkpointing: false, and use a smaller rollout.batch if memory is short"
                )
            if on:
                module.enable_gradient_checkpointing(_recomputed)
            else:
                module.disable_gradient_checkpointing()


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The library's own function takes no keyword arguments, but some of its blocks are called with keyword arguments.
    return checkpoint(block.__call__, *args, use_reentrant=False, **kwargs)


def _freeze(pipe: Any) -> None:
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
