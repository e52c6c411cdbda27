"""The cost of one evaluation of a network, found by running the network's code on the `meta` device without computing.

Matrix products are counted as in `torch.utils.flop_counter`, 2·m·n·k each. So a matrix of P weights that acts on N
tokens counts as 2·P·N, and the attention of a layer as 4·N²·width. Hooks for saved tensors see what autograd would
keep.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, shape_wrapper


@dataclass(frozen=True)
class Footprint:
    """Cost of one evaluation of one row.

    Attributes:
        forward: FLOPs of the prediction.
        backward: FLOPs of the gradient with respect to the trained weights.
        recompute: FLOPs of the blocks that gradient checkpointing evaluates a second time.
        working: largest number of bytes alive at once in a prediction without gradient, without the weights.
        mask: bytes in `working` of the largest mask that attention adds to its scores. They are kept for the gradient.
        saved: bytes kept for the gradient.
        kept: bytes kept for the gradient with gradient checkpointing: the inputs of the blocks, and everything outside
            the blocks.
        block: bytes of the largest block that is evaluated again, while its gradient is computed.
    """

    forward: float
    backward: float
    recompute: float
    working: int
    mask: int
    saved: int
    kept: int
    block: int


class Remembered(TorchDispatchMode):
    """Within this mode, equal operations on `meta` are computed once, and their results are remembered.

    A tensor on `meta` has no numbers. So the result of an operation follows from shapes, types and other arguments.
    PyTorch finds it in Python, which takes most of the time, and the layers of a model repeat the same operations.
    Modes that count must be entered within this one: an outer mode would not see what is remembered.
    """

    MOST = 100_000
    """Number of operations that are kept; then all of them are forgotten."""
    # For all passes of a program: what is remembered does not depend on the model.
    _known: ClassVar[dict[Any, Callable[[Any], Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            key = func, _described(args), _described(tuple(sorted(kwargs.items())))
            known = self._known.get(key)
        except (_NotAlike, TypeError):  # a TypeError is an argument without a hash
            return func(*args, **kwargs)
        if known is not None:
            return known(args)
        found = func(*args, **kwargs)
        if (again := _repeating(func, args, key[1], found)) is not None:
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[key] = again
        return found


class _NotAlike(Exception):
    """A tensor has more than its shape and its type, so operations on it are not remembered."""


def _described(value: Any) -> Any:
    """What the result of an operation depends on. Equal numbers of different types give results of different types."""
    if isinstance(value, Tensor):
        if not value.is_meta or value.is_complex() or value.layout is not torch.strided:
            raise _NotAlike
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, list | tuple):
        return tuple([_described(each) for each in value])
    return type(value), value


def _repeating(func: Any, args: Any, described: Any, found: Any) -> Callable[[Any], Any] | None:
    """A function of the arguments that gives again what an operation gave; None if there is none.

    What shares a storage with an argument is not given again. An operation in place is given again if it has left its
    tensor as it was.
    """
    if func._schema.is_mutable:
        if func.overloadpacket is torch.ops.aten.set_:  # it gives its tensor another storage
            return None
        return (lambda args: args[0]) if args and found is args[0] and _described(args) == described else None
    made = list(_tensors((found,)))
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    own = {tensor.untyped_storage()._cdata for tensor in made}
    if len(own) < len(made) or own & given or not all(_is_whole(tensor) for tensor in made):
        return None
    again = [partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device="meta") for t in made]
    if isinstance(found, Tensor):
        return lambda _: again[0]()
    kind = type(found)
    return (lambda _: kind([one() for one in again])) if kind in (list, tuple) and len(found) == len(made) else None


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor on `meta` takes all of its storage."""
    if not tensor.is_meta or tensor.is_complex() or tensor.storage_offset() != 0:
        return False
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage().nbytes() == (steps + 1 if tensor.numel() else 0) * tensor.element_size()


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations made and that are still in use; `most` is their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in _tensors((*args, *(kwargs or {}).values()))}
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors((found,)):
            if id(storage := tensor.untyped_storage()) not in given:
                self._born(storage)
        return found

    def _born(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._died, size)

    def _died(self, size: int) -> None:
        self.now -= size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors of what an operation takes or gives, also those in lists. `tree_leaves` would take far longer."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Saved:
    """Counts the storages that autograd saves within `hooks`, each storage once, without the storages of `weights`."""

    def __init__(self, weights: Any) -> None:
        self._weights = {t.untyped_storage()._cdata for t in weights}
        self._storages: dict[int, Any] = {}

    @property
    def bytes(self) -> int:
        """Bytes that autograd has saved up to now."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            # The reference keeps the storage alive, so that no later storage gets its address.
            self._storages[storage._cdata] = storage
        return tensor


class Attention(torch.autograd.Function):
    """Attention that saves what a fused kernel saves: inputs, output, and one number for each query and head."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tally: FlopTally, mask: Tensor | None = None
    ) -> Tensor:
        # The output has the layout of the query, as in fused kernels: the layout decides whether joining the heads
        # needs a copy.
        same = query.shape[-1] == value.shape[-1]
        out = torch.empty_like(query) if same else query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            # The kernels of torch take a mask as numbers that are added to the scores.
            mask = query.new_empty(mask.shape)
            tally.mask = max(tally.mask, mask.untyped_storage().nbytes())
        ctx.save_for_backward(query, key, value, out, sums, mask)
        ctx.tally = tally
        ctx.products = 2.0 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        tally.attention += ctx.products
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # The backward pass has five products and the forward pass two, because the scores are computed again.
        ctx.tally.attention += 2.5 * ctx.products
        return (*(tensor.new_empty(tensor.shape) for tensor in ctx.saved_tensors[:3]), None, None)


class GroupedProduct(torch.autograd.Function):
    """Products of rows with the matrices of their experts, for every dtype; on `meta`, torch has only 16-bit ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, tally: FlopTally) -> Tensor:
        # The gradient of each factor needs the other one.
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, rows if ctx.needs_input_grad[1] else None)
        ctx.shapes, ctx.tally, ctx.flops = (rows.shape, weight.shape), tally, 2.0 * rows.numel() * weight.shape[-1]
        tally.attention += ctx.flops
        return rows.new_empty((len(rows), weight.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = ctx.needs_input_grad[:2]
        ctx.tally.attention += ctx.flops * sum(wanted)
        found = [gradient.new_empty(shape) if asked else None for shape, asked in zip(ctx.shapes, wanted)]
        return (*found, None)


def _product_flops(added: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    """FLOPs of a product that adds to a tensor in place, which the counter of torch does not know."""
    return 2 * a.numel() * b[-1]


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products by the formulas of `torch.utils.flop_counter`.

    `FlopCounterMode` of torch also looks up the modules of each operation, and takes a third longer.
    """

    FORMULAS: ClassVar[dict[Any, Callable[..., int]]] = {
        **flop_registry,
        torch.ops.aten.addmm_: shape_wrapper(_product_flops),
    }

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if formula := self.FORMULAS.get(getattr(func, "overloadpacket", None)):
            self.total += formula(*args, **(kwargs or {}), out_val=found)
        return found


class FlopTally(TorchFunctionMode):
    """Replaces attention, because its plain form on `meta` would save a matrix with tokens × tokens entries.

    Tensors on `meta` have no numbers. So a condition on them holds, a mask keeps everything, and its inverse nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mask = 0.0, 0
        self.flops = Products()

    @property
    def total(self) -> float:
        return self.attention + float(self.flops.total)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args)) | (kwargs or {})
            return Attention.apply(named["query"], named["key"], named["value"], self, named.get("attn_mask"))
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func is Tensor.__invert__ and args[0].is_meta and args[0].dtype == torch.bool:
            inverse = func(*args)
            inverse.keeps_nothing = True
            return inverse
        if func is Tensor.__getitem__ and _is_mask(args[1]):
            return _masked(*args)
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """A copy of the rows that a mask on `meta` keeps: all of them, or none if the mask is the inverse of another."""
    rows = values.flatten(0, mask.dim() - 1)
    return rows[: 0 if hasattr(mask, "keeps_nothing") else len(rows)].clone()


@dataclass(frozen=True)
class _Block:
    """One block in a stack of equal blocks: its FLOPs, its saved bytes, and the bytes of its input streams."""

    forward: float
    backward: float
    saved: int
    streams: int


def footprint(module: nn.Module, inputs: Mapping[str, Any], rows: int = 1, *, alike: bool = True) -> Footprint:
    """The cost of `module(**inputs)` for each row, on `meta`; parameters that require a gradient count as trained.

    Args:
        module: a denoiser. If it cannot checkpoint its blocks, nothing is evaluated again.
        inputs: tensors on `meta`, which may be in dicts and lists.
        rows: number of rows of the inputs. A single row may need fewer copies than each of several rows.
        alike: among blocks whose weights have equal shapes, run only one, and multiply its cost by their number.
    """
    constants = _constants(module)
    fixed = {tensor.untyped_storage()._cdata for tensor in constants}
    tally, saved, live = FlopTally(), Saved(constants), LiveBytes()
    outside, calls = 0, list[tuple[nn.Module, Any, Any, Any]]()

    def watched(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal outside
        kept = saved.bytes
        found = block(*args, **kwargs)
        outside -= saved.bytes - kept
        calls.append((block, args, kwargs, found))
        return found

    with Remembered(), _shortened(module) if alike else contextlib.nullcontext() as counts:
        with torch.no_grad(), FlopTally(), live:
            module(**inputs, return_dict=False)
        with _checkpointing(module, watched), tally.flops, tally, saved.hooks(), torch.enable_grad():
            predictions = [t for t in tree_leaves(module(**inputs, return_dict=False)) if isinstance(t, Tensor)]
            forward, kept = tally.total, saved.bytes
            torch.autograd.backward(predictions, [torch.empty_like(prediction) for prediction in predictions])
    entering = _storages([(args, kwargs) for _, args, kwargs, _ in calls])
    known: dict[Any, _Block] = {}
    blocks = []
    for call in calls:
        kind = (_kind(call[0]), tuple(value.shape for value in tree_leaves(call[1:3]) if isinstance(value, Tensor)))
        if kind not in known:
            known[kind] = _alone(*call, constants)
        blocks.append(known[kind])
    repeats = [1] * len(blocks) if counts is None else counts
    more = [(count - 1, block) for count, block in zip(repeats, blocks, strict=True)]
    entered = sum(size for key, size in entering.items() if key not in fixed)
    whole, again = kept + sum(n * block.saved for n, block in more), _recomputes(module)
    inputs_alone = kept + outside + entered + sum(n * block.streams for n, block in more)
    return Footprint(
        forward=(forward + sum(n * block.forward for n, block in more)) / rows,
        backward=(tally.total - forward + sum(n * block.backward for n, block in more)) / rows,
        recompute=sum((n + 1) * block.forward for n, block in more) / rows if again else 0.0,
        working=live.most // rows,
        mask=tally.mask // rows,
        saved=whole // rows,
        kept=(inputs_alone if again else whole) // rows,
        block=max((block.saved for block in blocks), default=0) // rows if again else 0,
    )


def _alone(block: nn.Module, args: Any, kwargs: Any, found: Any, constants: list[Tensor]) -> _Block:
    """The cost of a block that runs alone. Its streams need gradients, because earlier blocks would change them."""
    shapes = {tensor.shape for tensor in tree_leaves(found) if isinstance(tensor, Tensor)}

    def is_stream(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.shape in shapes

    def cut(value: Any) -> Any:
        # Detached from the graph of the whole network, because the gradient of that graph is already computed.
        return (
            value.detach().requires_grad_(is_stream(value) or value.requires_grad)
            if isinstance(value, Tensor)
            else value
        )

    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    streams = _storages([value for value in given if is_stream(value)])
    tally, saved = FlopTally(), Saved([*constants, *(value for value in given if not is_stream(value))])
    args, kwargs = tree_map(cut, (args, kwargs))
    with tally.flops, tally, saved.hooks():
        outputs = [t for t in tree_leaves(block(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        forward = tally.total
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return _Block(forward, tally.total - forward, saved.bytes, sum(streams.values()))


def _storages(values: Any) -> dict[int, int]:
    """Bytes of the storages of all tensors in a nest of values; each storage counts once."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


@contextlib.contextmanager
def _shortened(module: nn.Module) -> Iterator[list[int]]:
    """Within this context each stack holds only one of its equal blocks; yields the number of each, in their order."""
    stacks = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    counts: list[int] = []
    for name, stack in stacks.items():
        kinds: dict[Any, list[nn.Module]] = {}
        for block in stack:
            kinds.setdefault(_kind(block), []).append(block)
        counts += [len(blocks) for blocks in kinds.values()]
        setattr(module, name, nn.ModuleList([blocks[0] for blocks in kinds.values()]))
    try:
        yield counts
    finally:
        for name, stack in stacks.items():
            setattr(module, name, stack)


def _kind(block: nn.Module) -> Any:
    """A key that is equal for blocks that have the same cost for equal inputs."""
    return type(block), tuple((key, value.shape, value.requires_grad) for key, value in block.named_parameters())


def _constants(module: nn.Module) -> list[Tensor]:
    """Weights, buffers, and tables that a module holds without registering them."""
    tables = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return [*module.parameters(), *module.buffers(), *tables]


def _recomputes(module: nn.Module) -> bool:
    """Whether a denoiser can checkpoint its blocks."""
    return bool(getattr(module, "_supports_gradient_checkpointing", True))


@contextlib.contextmanager
def _checkpointing(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Within this context, blocks that can be checkpointed, or else those of stacks, are called through `function`."""
    if _recomputes(module):
        module.enable_gradient_checkpointing(function)  # type: ignore[operator]
        try:
            yield
        finally:
            module.disable_gradient_checkpointing()  # type: ignore[operator]
        return
    stacks = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    for name, stack in stacks.items():
        setattr(module, name, nn.ModuleList([_Called(function, block) for block in stack]))
    try:
        yield
    finally:
        for name, stack in stacks.items():
            setattr(module, name, stack)


class _Called(nn.Module):
    """A block that is called through a function."""

    def __init__(self, function: Callable[..., Any], block: nn.Module) -> None:
        super().__init__()
        self.function, self.block = function, block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.block, *args, **kwargs)


@dataclass(frozen=True)
class Decoding:
    """The cost of decoding one latent.

    Attributes:
        flops: of decoding.
        working: largest number of bytes alive at once, without the weights.
        graph_flops: of decoding with a graph, and of the gradient with respect to the latent; 0 if not asked for.
        graph: bytes of the graph; 0 if not asked for.
    """

    flops: float
    working: int
    graph_flops: float = 0.0
    graph: int = 0


def decoding(vae: nn.Module, latent: Tensor, graph: bool = False) -> Decoding:
    """The cost of `vae.decode(latent)` on `meta`; with `graph`, also of its gradient with respect to the latent."""
    live, tally = LiveBytes(), FlopTally()
    with Remembered(), torch.no_grad(), tally.flops, tally, live:
        vae.decode(latent, return_dict=False)  # type: ignore[operator]
    if not graph:
        return Decoding(tally.total, live.most)
    vae.requires_grad_(False)
    both, saved, leaf = FlopTally(), Saved(_constants(vae)), latent.detach().requires_grad_()
    with Remembered(), both.flops, both, saved.hooks(), torch.enable_grad():
        (image, *_) = vae.decode(leaf, return_dict=False)  # type: ignore[operator]
        torch.autograd.backward([image], [torch.empty_like(image)])
    return Decoding(tally.total, live.most, both.total, saved.bytes)
