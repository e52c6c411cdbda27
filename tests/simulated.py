"""A device that is not the CPU's, on a machine that has only a CPU.

Tensors of the simulated device are computed on the CPU. Their storages carry a mark, and everything that is computed
from a marked tensor is marked. `tensor.device` says the name of the simulated device for a marked tensor. An operation
that mixes a marked tensor with one of the CPU raises, where a real device would raise: CPU scalars may be mixed with
everything, and indices of the CPU may choose from a tensor of the device. A generator of the CPU does not draw on the
device, and numpy does not read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "xpu"
"""The name of the simulated device: any of torch's names for which the build has no device."""

_TENSOR: Any = torch.Tensor
COPIES = ("aten::copy_", "aten::_to_copy")
JOINED = ("aten::cat", "aten::stack")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Marks:
    """The storages that are on the simulated device."""

    def __init__(self) -> None:
        # A weak reference to a storage keeps its address from being used again, so no mark passes to another storage.
        self._known: dict[int, StorageWeakRef] = {}

    def put(self, value: Any) -> Any:
        """Mark each tensor of a nest, and return the nest."""
        for tensor in _tensors(value):
            storage = _storage(tensor)
            self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        return value

    def have(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the simulated device."""
        return _storage(tensor)._cdata in self._known


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor; within `torch.vmap`, of the tensor with all its rows."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a nest. `tree_leaves` would take far longer, and every operation asks."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


class _Computing(TorchDispatchMode):
    """Every operation on storages: what comes from marked tensors is marked, and mixtures are refused."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = _tensors((args, kwargs))
        there = [tensor for tensor in given if self.marks.have(tensor)]
        if not there or name in COPIES:
            found = func(*args, **kwargs)
            # A copy in place stays where it is; other copies are of the device of the original.
            return self.marks.put(found) if there and name == "aten::_to_copy" else found
        here = [tensor for tensor in given if not self.marks.have(tensor) and (tensor.ndim > 0 or name in JOINED)]
        if name in INDEXED:
            # Indices may be on the CPU, and everything else must be where the tensor is from which they choose.
            here = [tensor for tensor in _tensors((args[0], args[2:])) if not self.marks.have(tensor) and tensor.ndim]
        changed = [
            value
            for argument, value in zip(func._schema.arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if here or any(not self.marks.have(tensor) for tensor in _tensors(changed)):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two devices, {NAME} "
                f"({[tuple(tensor.shape) for tensor in there]}) and cpu ({[tuple(tensor.shape) for tensor in here]})"
            )
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                raise RuntimeError(f"{name}: expected a generator of {NAME}, but found one of {leaf.device}")
        return self.marks.put(func(*args, **kwargs))


class SimulatedDevice(TorchFunctionMode):
    """What callers see: `.device`, moves from device to device, and new tensors on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = Marks()
        self.device = torch.device(NAME, 0)
        self._own: dict[Any, Callable[..., Any]] = {
            _TENSOR.device.__get__: self._device_of,
            _TENSOR.is_cpu.__get__: lambda x: self._device_of(x).type == "cpu",
            _TENSOR.get_device: lambda x: 0 if self.marks.have(x) else -1,
            _TENSOR.to: self._to,
            _TENSOR.cpu: lambda x, *a, **k: self._moved(x, x, False),
            _TENSOR.type_as: lambda x, other: self._to(x, other),
            _TENSOR.new_tensor: self._new_tensor,
            _TENSOR.numpy: self._on_the_cpu(_TENSOR.numpy),
            _TENSOR.__array__: self._on_the_cpu(_TENSOR.__array__),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = self._own.get(func)
        if own is not None:
            return own(*args, **kwargs)
        if kwargs.get("device") is not None and self._there(kwargs["device"]) is not None:
            return self._made(func, args, kwargs)
        found = func(*args, **kwargs)
        # Copies of storages do not come through the dispatcher.
        copied = getattr(func, "__name__", "") == "__deepcopy__" and self.marks.have(args[0])
        return self.marks.put(found) if copied else found

    def _device_of(self, x: Tensor) -> torch.device:
        if self.marks.have(x):
            return self.device
        return torch.device("meta" if x.is_meta else "cpu")

    def _there(self, device: Any) -> bool | None:
        """Whether a device is the simulated one; None for a device without storages."""
        kind = torch.device(device).type
        return None if kind == "meta" else kind == NAME

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor that a function makes on a device."""
        there = self._there(kwargs["device"])
        if there and kwargs.get("generator") is not None:
            raise RuntimeError(f"{resolve_name(func)}: expected a generator of {NAME}, but found one of cpu")
        given = [tensor for tensor in _tensors(args) if self.marks.have(tensor)]
        kwargs = {**kwargs, "device": "cpu"}
        if not given:
            found = func(*args, **kwargs)
            # `as_tensor` returns a tensor that it is given.
            same = any(found is one for one in _tensors(args))
            return self.marks.put(found.clone() if same else found) if there else found
        # `new_zeros`, `zeros_like` and the like, with a device of their own.
        found = func(*args, **kwargs)
        return found if there else _copied(found, self.marks, False)

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        like = next((one for one in (*args, kwargs.get("other")) if isinstance(one, Tensor)), None)
        named = [
            one
            for one in (*args, kwargs.get("device"))
            if isinstance(one, (str, int, torch.device)) and not isinstance(one, bool)
        ]
        there = self.marks.have(like) if like is not None else self._there(named[0]) if named else self.marks.have(x)
        if there is None or x.is_meta:
            return x.to(*args, **kwargs)
        plain = tuple("cpu" if any(one is n for n in named) else one for one in args)
        rest = {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs
        return self._moved(x, x.to(*plain, **rest), there)

    def _moved(self, x: Tensor, found: Tensor, there: bool) -> Tensor:
        """`found`, made from x with the marks of x, on the device of choice."""
        if self.marks.have(x) == there:
            return found
        return _Moved.apply(found, self.marks, there)

    def _new_tensor(self, x: Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        there = self.marks.have(x) if device is None else self._there(device)
        found = x.new_tensor(data, device="cpu", **kwargs)
        return self.marks.put(found) if there else found

    def _on_the_cpu(self, func: Callable[..., Any]) -> Callable[..., Any]:
        def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.marks.have(x):
                raise TypeError(f"can't convert {NAME} tensor to numpy; use Tensor.cpu() first")
            return func(x, *args, **kwargs)

        return read


class _Moved(torch.autograd.Function):
    """A copy on the other device; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Marks, there: bool) -> Tensor:
        ctx.marks, ctx.there = marks, there
        return _copied(x, marks, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _copied(gradients[0], ctx.marks, not ctx.there), None, None


def _copied(x: Tensor, marks: Marks, there: bool) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    made.copy_(x)
    return marks.put(made) if there else made


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Within this context, tensors can be moved to `torch.device(NAME)`, and leave it as from a real device."""
    mode = SimulatedDevice()
    with _Computing(mode.marks), mode:
        yield mode
