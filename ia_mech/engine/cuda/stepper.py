"""One decoding step in buffers of fixed addresses: on a CPU it is run, on a GPU replayed.

A step embeds the newest token of every line, runs the model, draws the next tokens and notes what
is recorded about them, all without the host: it launches and doesn't wait. What several steps drew
is sent to the host, which says afterwards which lines go on, and which begin anew.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ia_mech.engine.cuda import fused, kernels
from ia_mech.engine.cuda.copies import HostCopy, start_copy, to_device
from ia_mech.engine.cuda.layer import StaticLayer, View
from ia_mech.engine.cuda.recurrent import StaticRecurrentLayer
from ia_mech.engine.cuda.sizes import Shape, Sizes, demand, free_bytes, needed_bytes
from ia_mech.engine.prefill import Prefilled
from ia_mech.engine.sampling import Draw, draw, gumbel
from ia_mech.engine.shared_prefix import sharing
from ia_mech.models.load import accepts, text_config

STEPS = 2  # launched together, while the host looks at those before: a row's end is seen 2.5 late
FIELDS = tuple(field.name for field in fields(Draw))

# What stands in for which layer of a cache; made from such a layer, prefilled, and sizes.
STATIC: dict[type, Callable[..., StaticLayer | StaticRecurrentLayer]] = {
    DynamicLayer: StaticLayer,
    DynamicSlidingWindowLayer: StaticLayer,
    LinearAttentionLayer: StaticRecurrentLayer,
}

_kept: WeakKeyDictionary[PreTrainedModel, "Stepper"] = WeakKeyDictionary()


def why_not(model: PreTrainedModel) -> str:
    """What keeps this model from being decoded in static buffers; empty where nothing does."""
    kinds = (type(layer) for layer in DynamicCache(config=model.config).layers)
    other = next((kind.__name__ for kind in kinds if kind not in STATIC), None)
    if other is not None:
        return f"no CUDA graphs: a {other} isn't kept at fixed addresses"
    # Their caches are those of sliding windows, their masks are not.
    if getattr(text_config(model.config), "attention_chunk_size", None) is not None:
        return "no CUDA graphs: some layers attend in chunks"
    if not accepts(model, "position_ids"):
        return "no CUDA graphs: the model finds positions by itself"
    return ""


def stepper_for(model: PreTrainedModel, sizes: Sizes, group: Prefilled) -> "Stepper":
    """The model's stepper of these sizes: the last one if it is, else a new one in its place.

    Args:
        model: the subject model.
        sizes: of the batch.
        group: contexts that were prefilled, for shapes.

    Raises:
        MemoryError: the device hasn't the memory.
    """
    kept = _kept.get(model)
    if kept is not None and kept.sizes == sizes and kept.weights == _weights(model):
        kept.reset()
        return kept
    del kept
    forget(model)  # before the next one is made
    _kept[model] = Stepper(model, sizes, group)
    return _kept[model]


def forget(model: PreTrainedModel) -> None:
    """Give back the memory of the model's last stepper, if there is one."""
    _kept.pop(model, None)


def _weights(model: PreTrainedModel) -> tuple[int, torch.dtype]:
    """Tells a model from itself after it was moved or cast: graphs hold addresses."""
    one = next(model.parameters())
    return one.data_ptr(), one.dtype


class Stepper:
    """A batch of lines, all of whose tensors stay where they are.

    Args:
        model: the subject model; kept weakly, so that a stepper may be kept for it.
        sizes: of the batch.
        group: contexts that were prefilled, for shapes.
        graphs: steps are replayed as CUDA graphs; None = if the model is on a GPU.

    Attributes:
        sizes: as given.
        weights: tells whether the model is where it was.

    Raises:
        MemoryError: the device hasn't the memory.
    """

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, sizes: Sizes, group: Prefilled, graphs: bool | None = None
    ) -> None:
        layers, device = group.state.cache.layers, group.logits.device
        on_gpu = device.type == "cuda"
        self._fused = fused.available(device)
        self._by_kernels = kernels.usable(device, model.dtype)
        if on_gpu:
            shape = Shape.of(text_config(model.config), layers, group.logits, model.dtype)
            demand(needed_bytes(shape, sizes, self._by_kernels), free_bytes(device))
        self._model, self.sizes, self.weights = weakref.ref(model), sizes, _weights(model)
        self._cache = DynamicCache(config=model.config)
        self._layers = [STATIC[type(layer)](layer, sizes) for layer in layers]
        self._cache.layers = [*self._layers]
        self._device = device

        def numbers(*shape: int, fill: int = 0, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        # Of each line: its newest token, how many it drew, the position of its first one,
        # temperature and Philox key.
        self._token, self._age = numbers(sizes.lines), numbers(sizes.lines, fill=1)
        self._start = numbers(sizes.lines)
        self._temperature = numbers(sizes.lines, dtype=torch.float32)
        self._key = numbers(sizes.lines, 2)
        # Of each slot, the tokens of its context. One of a free slot: no softmax over nothing.
        self._length = numbers(sizes.slots, fill=1)
        self._line_at = numbers(sizes.slots * sizes.seats)
        self._seat_of = numbers(sizes.lines)
        self._drawn = numbers(STEPS, len(FIELDS), sizes.lines, dtype=torch.float64)
        self._at = numbers(1)  # the step of _drawn that is written next
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = None
        if on_gpu if graphs is None else graphs:
            # One stream and one pool for all captures: only so do graphs share their memory.
            self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(device)

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes and that is still there after it."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + [t for layer in self._layers for t in layer.tensors()]

    @torch.inference_mode()
    def reset(self) -> None:
        """Lines are as in a new stepper. Nobody looks at idle ones, but experts count them in."""
        for tensor in (self._token, self._start, self._temperature, self._key):
            tensor.zero_()
        self._age.fill_(1)
        self._length.fill_(1)
        for layer in self._layers:
            layer.forget_rows()

    # -- between steps --------------------------------------------------------------------------

    @torch.inference_mode()
    def put_contexts(self, slots: Sequence[int], group: Prefilled, contexts: Sequence[int]) -> None:
        """The prefixes of contexts of a group are copied to slots."""
        told = torch.tensor(slots), torch.tensor(contexts)
        slot, context = (to_device(tensor, self._device) for tensor in told)
        padding = (group.state.mask[context].cumsum(-1) == 0).sum(-1)
        for ours, theirs in zip(self._layers, group.state.cache.layers, strict=True):
            ours.put_prefixes(slot, theirs, context, padding)
        self._length[slot] = group.state.mask.shape[1] - padding

    @torch.inference_mode()
    def begin(
        self,
        lines: Sequence[int],
        slots: Sequence[int],
        group: Prefilled,
        index: Tensor,
        temperature: Tensor,
        key: Tensor,
    ) -> HostCopy:
        """Rows draw their first token and begin in these lines.

        Args:
            lines: one for each row.
            slots: ``[rows]``, where the prefix of each one's context is.
            group: contexts that were prefilled.
            index: ``[rows]`` int64, which of these each row goes on from.
            temperature: ``[rows]`` float32, 0 for greedy.
            key: ``[rows, 2]`` int64.

        Returns:
            What was drawn, ``[1, 5, rows]``, as :meth:`run` returns it.
        """
        told = torch.tensor(lines), torch.tensor(slots), index, temperature, key
        at, slot, index, temperature, key = (to_device(tensor, self._device) for tensor in told)
        for ours, theirs in zip(self._layers, group.state.cache.layers, strict=True):
            ours.begin(at, theirs, index)
        drawn = self._draw(group.logits[index], temperature, key, torch.zeros_like(at))
        self._token[at] = drawn.token
        self._age[at] = 1
        self._start[at] = self._length[slot]
        self._temperature[at] = temperature
        self._key[at] = key
        return start_copy(_noted(drawn)[None])

    @torch.inference_mode()
    def keep(self, lines: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """These lines become the first ones, and prefixes move from slot to slot."""
        index = to_device(torch.tensor(lines), self._device)
        for tensor in (self._token, self._age, self._start, self._temperature, self._key):
            tensor[: len(lines)] = tensor[index]
        for layer in self._layers:
            layer.keep(index)
            for start, to in moves:
                layer.move_prefix(start, to)
        for start, to in moves:
            self._length[to] = self._length[start]

    @torch.inference_mode()
    def seat(self, line_at, seat_of) -> None:
        """Who sits where, as :meth:`ia_mech.engine.cuda.seating.Seating.tables` says."""
        for ours, table in ((self._line_at, line_at.ravel()), (self._seat_of, seat_of)):
            ours[: table.size] = to_device(torch.from_numpy(table), self._device)

    # -- steps ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, lines: int, steps: int) -> HostCopy:
        """Make so many steps, at most :data:`STEPS`, of the bucket of so many lines.

        Returns:
            What is drawn, ``[steps, 5, bucket]`` float64, fields as :data:`FIELDS`.
        """
        sizes = self.sizes.bucket(lines)
        self._at.zero_()
        if self._graphs is None:
            for _ in range(steps):
                self._step(sizes)
        else:
            if sizes.lines not in self._graphs:
                self._graphs[sizes.lines] = self._capture(sizes)
            for _ in range(steps):
                self._graphs[sizes.lines].replay()
        return start_copy(self._drawn[:steps, :, : sizes.lines])

    def _step(self, sizes: Sizes) -> None:
        n, model = sizes.lines, self._model()
        assert model is not None  # whoever asks for a step holds it
        token, age = self._token[:n], self._age[:n]
        # A row that ended goes on until the host sees it; what it writes then is in nobody's way.
        place = (age - 1).clamp(max=sizes.own - 1)
        self._look(sizes, place)
        with sharing(model, self._cache):
            output = model(
                input_ids=token[:, None],
                position_ids=(self._start[:n] + place)[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
        drawn = self._draw(output.logits[:, -1], self._temperature[:n], self._key[:n], age)
        self._drawn[:, :, :n].index_copy_(0, self._at, _noted(drawn)[None])
        token.copy_(drawn.token)
        age.add_(1)
        self._at.add_(1)

    def _look(self, sizes: Sizes, place: Tensor) -> None:
        """Tell the layers where each line writes, and what it looks at."""
        view = View(
            sizes,
            place=place,
            length=self._length[: sizes.slots],
            line_at=self._line_at[: sizes.slots * sizes.seats],
            seat_of=self._seat_of[: sizes.lines],
            by_kernels=self._by_kernels,
        )
        for layer in self._layers:
            layer.look(view)

    def _draw(self, logits: Tensor, temperature: Tensor, key: Tensor, age: Tensor) -> Draw:
        if self._fused:
            return fused.draw(logits, temperature, key, age)  # converts on the way
        # Without telling rows of one stream apart: to find them the host would have to wait.
        noise = gumbel(key, age[:, None], logits.shape[-1])
        each = torch.arange(len(age), device=self._device)
        return draw(logits.float(), temperature, noise, each)

    def _capture(self, sizes: Sizes) -> torch.cuda.CUDAGraph:
        """The step of a bucket as a graph; what it advances is left as it was."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._warm_up(sizes)
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps one workspace for a stream, which others may clear. Made anew during the
        # capture it is in the graphs' own memory.
        torch._C._cuda_clearCublasWorkspaces()
        # Graphs may share memory: one at a time is replayed, and nothing that a graph makes is
        # looked at after it but what it writes into our own tensors.
        # PyTorch doesn't leave the stream when a capture fails, so that is done around it.
        with torch.cuda.stream(current), self._capturing(graph):
            self._step(sizes)
        torch._C._cuda_clearCublasWorkspaces()
        return graph

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Another thread may be writing what was drawn before, which is no part of the graph.
        return torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local")

    def _warm_up(self, sizes: Sizes) -> None:
        """Steps that advance nothing. Keys and values they do write, where the next step writes."""
        advanced = self._token, self._age, self._at
        before = [tensor.clone() for tensor in advanced]
        recurrent = [layer for layer in self._layers if isinstance(layer, StaticRecurrentLayer)]
        scratch: dict[tuple, Tensor] = {}
        try:
            for layer in recurrent:
                layer.step_aside(scratch)
            # In the first one libraries make what they make on first use, and may wait.
            for guard in (contextlib.nullcontext(), _no_waiting(self._device)):
                with guard:
                    self._step(sizes)
                for tensor, value in zip(advanced, before, strict=True):
                    tensor.copy_(value)
        finally:
            for layer in recurrent:
                layer.step_aside(None)


@contextlib.contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Raises RuntimeError where the host waits for a GPU, which no capture survives: PyTorch before
    2.13 is left in disorder by one that fails."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _noted(drawn: Draw) -> Tensor:
    """``[5, rows]`` float64, which holds ids, ranks and float32 alike, so that one copy has all."""
    return torch.stack([getattr(drawn, name).double() for name in FIELDS])
