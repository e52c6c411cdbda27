"""A cache of text embeddings: each prompt is encoded once, so that text encoders can leave the accelerator.

`PromptCache` replaces a pipeline's own `encode_prompt`. The pipeline's `__call__` does not notice the replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import TEXT
from .capture import ConditionedPrompt, PipelineCall, stopping_at_denoiser
from .encodings import fingerprint
from .joining import Layout, joined, layout_of
from .placement import offload_of
from .recorder import Recorder

# Some classes take one prompt at a time. This argument has all texts of the prompt, the negative text first; the texts
# are cached together.
_LIST = "prompts"
_PROBE_TEXTS = ("a", "a red circle above three blue squares")


class _Released:
    """Placeholder for a released text encoder: pipelines read its dtype, but nothing may call it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        parameter = next(module.parameters(), torch.zeros(0))
        self.name = name
        self.dtype: torch.dtype = getattr(module, "dtype", parameter.dtype)
        self.device = parameter.device
        self.config = getattr(module, "config", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self.name} has been released, and the pipeline encodes something that the cache of prompts does not "
            "keep; write model.release_text_encoders: false (in a program of your own: close the PromptCache first)"
        )


class PromptCache:
    """Memoises `pipe.encode_prompt`, with one entry for each prompt, until `close`.

    Prompts are encoded one at a time, without gradient, so an embedding never depends on its neighbours. Batches are
    joined from the entries and padded with zeros. To find out which outputs are batched, and along which dimension, a
    batch of two is encoded once for each set of other arguments. Pictures that go into `encode_prompt` are
    distinguished by their content. A class whose denoiser reads the tokens of prompts itself, such as OmniGen, has no
    `encode_prompt`, and nothing of it is cached.

    Args:
        pipe: the pipeline. `pipe.encode_prompt` is replaced on this instance.
        call: the keyword arguments of the later calls of the pipeline, as for `Denoiser`. `encode` needs them because
            they decide what is encoded (negative prompts, sequence lengths).
        device: where entries are kept; None leaves them where they were computed.
        most: number of entries that are kept while the text encoders are loaded. The entry that was requested longest
            ago is dropped first, and is encoded again if it is requested again. None keeps all entries.
        spare: bytes; more than `most` entries are kept while all entries together need no more than this.
        overflow: where entries are kept that come once the others need `spare` bytes; None keeps all on `device`.
        changes: for each kind of other calls, the arguments that they have in place of `call`'s. Each prompt then has
            an entry more for each kind that changes what is encoded, as guidance does, and `most` counts prompts.

    Raises:
        ValueError: if the pipeline already has a cache.
    """

    def __init__(
        self,
        pipe: Any,
        call: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        most: int | None = None,
        spare: int = 0,
        overflow: torch.device | str | None = None,
        changes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if "encode_prompt" in pipe.__dict__:
            raise ValueError(
                f"the encode_prompt of this {type(pipe).__name__} is already replaced by a cache; close that cache "
                "first"
            )
        self.pipe = pipe
        self.device = None if device is None else torch.device(device)
        self._prompts, self.spare = most, spare
        self.overflow = self.device if overflow is None else torch.device(overflow)
        self._bytes = 0
        self._latest: tuple[Any, Any] | None = None
        self._caller = PipelineCall(pipe, call or {})
        self._changes: tuple[Mapping[str, Any], ...] = ({}, *changes)
        # The keys of entries begin with the other arguments; here are those of calls without changes.
        self._own: set[Any] = set()
        # What distinguishes the entries of one prompt: the other arguments, and a negative text.
        self._kinds: set[Any] = set()
        self._unchanged = False
        self._entries: dict[Any, Any] = {}
        self._layouts: dict[Any, Layout] = {}
        self._texts: dict[Any, str] = {}
        self._released: dict[str, tuple[nn.Module | None, torch.device]] = {}
        self._encodes = hasattr(pipe, "encode_prompt")
        if not self._encodes:
            return
        self._encode_prompt = offload_of(pipe).around("text_encoders", pipe.encode_prompt)
        self._signature = inspect.signature(pipe.encode_prompt)

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            return self._answer(args, kwargs)

        encode_prompt.prompt_cache = self  # type: ignore[attr-defined]
        pipe.__dict__["encode_prompt"] = encode_prompt

    @property
    def most(self) -> int | None:
        """The number of entries that are kept; None keeps all. It grows when a call encodes prompts in a new way."""
        return None if self._prompts is None else self._prompts * max(min(len(self._kinds), len(self._changes)), 1)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The positive prompts that `encode` has seen, in order."""
        return tuple(self._texts.values())

    def encode(self, prompts: Iterable[str]) -> None:
        """Encode prompts in advance, by one call of the pipeline for each prompt, up to the denoiser.

        Args:
            prompts: texts; a text that was encoded before is skipped.

        Raises:
            ValueError: if the pipeline does not use `encode_prompt`, or a prompt is new after `release`.
        """
        for prompt in prompts:
            mark = (str(prompt), prompt.mark if isinstance(prompt, ConditionedPrompt) else None)
            if mark in self._texts:
                continue
            if self._encodes:
                self._run(prompt)
            if self._encodes and not self._entries:
                raise ValueError(
                    f"{type(self.pipe).__name__} does not call encode_prompt; its prompts cannot be cached"
                )
            # The first prompt is kept with its pictures, as an example for later calls. Of the other prompts only the
            # text is kept, because their pictures may be many.
            self._texts[mark] = str(prompt) if self._texts else prompt

    def ready(self, prompts: Iterable[str]) -> None:
        """Encode the prompts that have no entry now. The text encoders are fetched once for all of them."""
        with offload_of(self.pipe).needed("text_encoders", when_called=True):
            for prompt in prompts:
                self._run(prompt)

    def _run(self, prompt: str) -> None:
        """Call the pipeline up to its denoiser."""
        recorder = Recorder(self.pipe.scheduler)
        with torch.no_grad(), stopping_at_denoiser(self.pipe):
            for changes in self._changes:
                self._unchanged = not changes
                # Two steps, because some pipelines divide by half the number of steps.
                recorder.arm(None)
                with self._caller.called_with(changes):
                    self._caller.run(recorder, [prompt], 2, output_type="latent")
                self._unchanged = False

    def features(self, prompt: str) -> Tensor:
        """A prompt's embeddings as one float32 vector on the CPU: the mean of each over its tokens, concatenated.

        Raises:
            ValueError: as in `encode`, or the pipeline has no `encode_prompt`.
        """
        if not self._encodes:
            raise ValueError(
                f"{type(self.pipe).__name__} has no encode_prompt, so there are no embeddings of prompts for a critic; "
                "use a recipe without a critic"
            )
        self.encode([prompt])
        own = ((row, entry) for (context, row), entry in reversed(self._entries.items()) if context in self._own)
        texts = {_prompt_of(dict(row)): entry for row, entry in own}
        # Some classes put words of their own before a prompt; then this is the shortest text that ends with the prompt.
        entry = texts[prompt if prompt in texts else min((t for t in texts if t.endswith(prompt)), key=len)]
        parts = [part.float() for part in _tensors(entry) if part.is_floating_point()]
        # Entries may be on several devices.
        return torch.cat([part.reshape(-1, part.shape[-1]).mean(0).cpu() for part in parts])

    def release(self, names: Sequence[str] | None = None, *, keep: bool = True) -> None:
        """Remove text encoders from the pipeline. Cached prompts still work.

        Args:
            names: components to release; None means all modules named `text_encoder*` that no call needs.
            keep: keep their weights on the CPU so that `close` can put them back; with False, they are lost.

        Raises:
            ValueError: if a name is not a module of the pipeline.
        """
        if names is None:
            kept = self._caller.adapter.kept
            names = [name for name in self.pipe.components if name.startswith("text_encoder") and name not in kept]
            names = [name for name in names if isinstance(getattr(self.pipe, name), nn.Module)]
        for name in names:
            module = getattr(self.pipe, name, None)
            if not isinstance(module, nn.Module):
                raise ValueError(f"{type(self.pipe).__name__} has no module named {name!r} to release")
            stand_in = _Released(name, module)
            self._released[name] = (module.to("cpu") if keep else None, stand_in.device)
            # The pipeline's own __setattr__ is bypassed: it would write the stand-in into the pipeline's config.
            self.pipe.__dict__[name] = stand_in

    def close(self) -> None:
        """Restore the pipeline's own `encode_prompt` and its text encoders (None for encoders that were not kept)."""
        self.pipe.__dict__.pop("encode_prompt", None)
        for name, (module, device) in self._released.items():
            self.pipe.__dict__[name] = None if module is None else module.to(device)
        self._released.clear()

    def __enter__(self) -> PromptCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the original `encode_prompt`, joined from the results for single prompts."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        target = torch.device(arguments.get("device") or self.pipe._execution_device)
        asked = (target, arguments) if _plain(arguments) else None
        if asked is not None and self._latest is not None and self._latest[0] == asked:
            return self._latest[1]
        listed = isinstance(arguments.get(_LIST), list) and self._caller.adapter.together == "one"
        if arguments.get("prompt") is None and "batch_size" in arguments and not _tensors(arguments):
            # HunyuanVideo 1.5 leaves out an empty negative prompt, and only says for how many rows it is.
            arguments["prompt"] = [""] * arguments["batch_size"]
        unnamed = arguments.get("prompt") is None and not listed
        if unnamed or any(fingerprint(value) is None for value in arguments.values()):
            # The caller gave embeddings, or a condition that has no fingerprint to serve as a key.
            return self._encode_prompt(*args, **kwargs)
        for name, value in arguments.items():
            if name.endswith("_per_prompt") and value not in (None, 1):
                raise ValueError(f"{name} is {value}; with a PromptCache it must be 1: repeat the prompt instead")
        ours = self._caller.adapter.rows
        texts = {name: value for name, value in arguments.items() if TEXT.fullmatch(name) and value is not None}
        texts |= {name: arguments[name] for name in ours if isinstance(arguments.get(name), list)}
        if listed:
            texts = {_LIST: [tuple(arguments[_LIST])]}
        # The batch size of the caller is replaced, because single prompts are encoded here.
        counts = {"batch_size"} & arguments.keys()
        others = {name: value for name, value in arguments.items() if name not in texts and name not in counts}
        context = tuple((name, fingerprint(value)) for name, value in sorted(others.items()) if name != "device")
        if self._unchanged:
            self._own.add(context)
        # The rows of one prompt share their texts. A key for each row would cost more than the rest of this method.
        marked = [(tuple(v if isinstance(v, str) else id(v) for v in row.values()), row) for row in _rows(texts)]
        # Each prompt is moved once, not once for each of its rows.
        found = {mark: _moved(self._entry(context, row, others, counts), target) for mark, row in dict(marked).items()}
        entries = [found[mark] for mark, _ in marked]
        whole = entries[0] if len(entries) == 1 else joined(self._layouts[context], entries)
        # Every step of a rollout makes the same request.
        self._latest = (asked, whole) if asked is not None and _size(whole) <= self.spare else None
        return whole

    def _entry(self, context: Any, row: dict[str, Any], others: dict[str, Any], counts: set[str]) -> Any:
        key = (context, tuple((name, value if isinstance(value, str) or name == _LIST else fingerprint(value))
                              for name, value in sorted(row.items())))  # fmt: skip
        self._kinds.add((context, tuple(one for one in key[1] if one[0].startswith("negative"))))
        if key not in self._entries:
            if self._released:
                raise ValueError(
                    f"prompt {_prompt_of(row)!r} (with {_listed(row)}) was not encoded before the text "
                    "encoders were released; pass it to PromptCache.encode before the release, with the present call "
                    "arguments, or do not release the text encoders"
                )

            def encoded(rows: int, values: dict[str, Any]) -> Any:
                return self._encode_prompt(**values, **others, **dict.fromkeys(counts, rows))

            with torch.inference_mode(False), torch.no_grad():
                if context not in self._layouts and self._caller.adapter.together != "one":
                    # The pair has our own texts, because two long texts of the user might be cut to equal length.
                    pair = {
                        n: list(_PROBE_TEXTS) if isinstance(value, str) else [value] * 2 for n, value in row.items()
                    }
                    one = encoded(1, {name: values[:1] for name, values in pair.items()})
                    self._layouts[context] = layout_of(one, encoded(2, pair))
                found = encoded(1, {name: list(value) if name == _LIST else [value] for name, value in row.items()})
            self._bytes += _size(found)
            self._entries[key] = _moved(found, self.device if self._bytes <= self.spare else self.overflow)
        entry = self._entries[key] = self._entries.pop(key)
        most = self.most
        if most is not None and not self._released:
            while len(self._entries) > most and self._bytes > self.spare:
                self._bytes -= _size(self._entries.pop(next(iter(self._entries))))
        return entry


def encode_ahead(pipe: Any, prompts: Iterable[str]) -> None:
    """Encode prompts before their rollout if text encoders wait in host memory; the encoders are fetched only once."""
    cache = getattr(pipe.__dict__.get("encode_prompt"), "prompt_cache", None)
    if cache is not None and offload_of(pipe).waits("text_encoders"):
        distinct = {(str(p), p.mark if isinstance(p, ConditionedPrompt) else None): p for p in prompts}
        cache.ready(distinct.values())


def _rows(texts: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each row; a text that is given once belongs to all rows."""
    first = texts[_LIST if _LIST in texts else "prompt"]
    count = 1 if isinstance(first, str) else len(first)
    for name, value in texts.items():
        if not isinstance(value, str) and len(value) != count:
            raise ValueError(
                f"{name} has {len(value)} texts but prompt has {count}; give one for each, or a single string"
            )
    return [
        {name: value if isinstance(value, str) else value[j] for name, value in texts.items()} for j in range(count)
    ]


def _prompt_of(row: Mapping[str, Any]) -> str:
    """The positive prompt of a row, in the words of the pipeline's class."""
    text: str = row[_LIST][-1] if _LIST in row else row["prompt"]
    return text


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if device is None else value.detach().to(device)
    if isinstance(value, (list, tuple)):
        return type(value)([_moved(item, device) for item in value])
    return value


def _plain(arguments: Mapping[str, Any]) -> bool:
    """Whether all values can be compared with `==`: texts, lists of texts, and plain settings."""
    return all(
        value is None
        or isinstance(value, (str, bool, int, float, torch.device, torch.dtype))
        or (isinstance(value, list) and all(type(item) is str for item in value))
        for value in arguments.values()
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in nested for tensor in _tensors(part)]


def _size(value: Any) -> int:
    """Bytes of the tensors in an entry."""
    return sum(tensor.nbytes for tensor in _tensors(value))


def _listed(row: dict[str, Any]) -> str:
    rest = {name: text for name, text in row.items() if name not in ("prompt", _LIST)}
    return ", ".join(f"{name}={text!r}" for name, text in rest.items()) or "no other text"
