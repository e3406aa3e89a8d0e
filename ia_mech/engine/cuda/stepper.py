"""One decoding step in buffers of fixed addresses: on a CPU it is run, on a GPU replayed.

A step embeds the newest token of every line, runs the model, draws the next tokens and notes what
is recorded about them, all without the host: it launches and doesn't wait. Several steps are made
before the host reads what they drew; it then says which lines go on, and which begin anew.
"""

import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ia_mech.engine.cuda import fused, kernels
from ia_mech.engine.cuda.layer import StaticLayer, View
from ia_mech.engine.cuda.sizes import Shape, Sizes, demand, free_bytes, needed_bytes
from ia_mech.engine.prefix import Prefilled, left_padding
from ia_mech.engine.shared import Engine, sharing
from ia_mech.models import accepts, text_config
from ia_mech.sampling import Draw, draw, gumbel

STEPS = 4  # between two looks of the host; a row that ends waits 1.5 of them on average
WARM_UP = 2  # steps before a capture, in which libraries make what they make on first use
FIELDS = tuple(field.name for field in fields(Draw))

_kept: WeakKeyDictionary[PreTrainedModel, "Stepper"] = WeakKeyDictionary()


def why_not(model: PreTrainedModel) -> str:
    """What keeps this model from being decoded in static buffers; empty where nothing does."""
    engine = Engine.possible(model)
    if engine.shared < engine.layers:
        return "no CUDA graphs: some layers hold state that isn't kept at fixed addresses"
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
    if kept is not None and kept.sizes == sizes:
        return kept
    del kept
    _kept.pop(model, None)  # before the next one is made
    _kept[model] = Stepper(model, sizes, group)
    return _kept[model]


class Stepper:
    """A batch of lines, all of whose tensors stay where they are.

    Args:
        model: the subject model; kept weakly, so that a stepper may be kept for it.
        sizes: of the batch.
        group: contexts that were prefilled, for shapes.
        graphs: steps are replayed as CUDA graphs; None = if the model is on a GPU.

    Attributes:
        sizes: as given.

    Raises:
        MemoryError: the device hasn't the memory.
    """

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, sizes: Sizes, group: Prefilled, graphs: bool | None = None
    ) -> None:
        layers, device = group.state.cache.layers, group.logits.device
        on_gpu = device.type == "cuda"
        self._fused = on_gpu and fused.available()
        self._by_kernels = kernels.usable(device, layers[0].keys.dtype)
        if on_gpu:
            shape = Shape.of(text_config(model.config), layers, group.logits)
            demand(needed_bytes(shape, sizes, self._by_kernels), free_bytes(device))
        self._model, self.sizes = weakref.ref(model), sizes
        self._cache = DynamicCache(config=model.config)
        self._cache.layers = [StaticLayer(layer, sizes, self._by_kernels) for layer in layers]
        self._dtype, self._device = layers[0].keys.dtype, device

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
        # float64 holds ids, ranks and float32 alike, so that all is read in one copy.
        self._drawn = numbers(STEPS, len(FIELDS), sizes.lines, dtype=torch.float64)
        self._at = numbers(1)  # the step of _drawn that is written next
        self._prefix_tokens = torch.arange(sizes.prefix, device=device)
        self._own_tokens = torch.arange(sizes.own, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = None
        if on_gpu if graphs is None else graphs:
            # One stream and one pool for all captures: only so do graphs share their memory.
            self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(device)

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or writes and that is still there after it."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + [t for layer in self._cache.layers for t in (*layer.own, *layer.prefix)]

    # -- between steps --------------------------------------------------------------------------

    @torch.inference_mode()
    def put_context(self, slot: int, group: Prefilled, context: int) -> None:
        """The prefix of a context of a group is copied to a slot."""
        padding = left_padding(group.state.mask[context : context + 1])[0]
        for ours, theirs in zip(self._cache.layers, group.state.cache.layers, strict=True):
            ours.put_prefix(slot, theirs, context, padding)
        self._length[slot] = group.state.mask.shape[1] - padding

    @torch.inference_mode()
    def begin(
        self,
        lines: Sequence[int],
        slots: Sequence[int],
        token: Tensor,
        temperature: Tensor,
        key: Tensor,
    ) -> None:
        """Rows that drew their first token begin in these lines.

        Args:
            lines: one for each row.
            slots: ``[rows]``, where the prefix of each one's context is.
            token: ``[rows]`` int64, what they drew.
            temperature: ``[rows]`` float32, 0 for greedy.
            key: ``[rows, 2]`` int64.
        """
        at = torch.tensor(lines, device=self._device)
        self._token[at] = token
        self._age[at] = 1
        self._start[at] = self._length[torch.tensor(slots, device=self._device)]
        self._temperature[at] = temperature.to(self._device)
        self._key[at] = key.to(self._device)

    @torch.inference_mode()
    def keep(self, lines: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """These lines become the first ones, and prefixes move from slot to slot."""
        index = torch.tensor(lines, device=self._device)
        for tensor in (self._token, self._age, self._start, self._temperature, self._key):
            tensor[: len(lines)] = tensor[index]
        for layer in self._cache.layers:
            layer.keep(index)
            for start, to in moves:
                layer.move_prefix(start, to)
        for start, to in moves:
            self._length[to] = self._length[start]

    @torch.inference_mode()
    def seat(self, line_at, seat_of) -> None:
        """Who sits where, as :meth:`ia_mech.engine.cuda.seating.Seating.tables` says."""
        self._line_at[: line_at.size] = torch.from_numpy(line_at.ravel()).to(self._device)
        self._seat_of[: seat_of.size] = torch.from_numpy(seat_of).to(self._device)

    # -- steps ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, lines: int, steps: int) -> Tensor:
        """Make so many steps, at most :data:`STEPS`, of the bucket of so many lines.

        Returns:
            What was drawn, ``[steps, 5, bucket]`` float64 on the CPU, fields as :data:`FIELDS`.
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
        return self._drawn[:steps, :, : sizes.lines].cpu()  # here the host waits

    def _step(self, sizes: Sizes) -> None:
        n, model = sizes.lines, self._model()
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
        noted = torch.stack([getattr(drawn, name).double() for name in FIELDS])
        self._drawn[:, :, :n].index_copy_(0, self._at, noted[None])
        token.copy_(drawn.token)
        age.add_(1)
        self._at.add_(1)

    def _look(self, sizes: Sizes, place: Tensor) -> None:
        """Tell the layers where each line writes, and what it looks at."""
        length = self._length[: sizes.slots]
        view = View(
            sizes,
            place=place,
            length=length,
            line_at=self._line_at[: sizes.slots * sizes.seats],
            seat_of=self._seat_of[: sizes.lines],
        )
        if not self._by_kernels:
            view = replace(
                view,
                own_bias=self._bias(self._own_tokens > place[:, None]),
                prefix_bias=self._bias(self._prefix_tokens >= length[:, None]),
            )
        for layer in self._cache.layers:
            layer.view = view

    def _bias(self, unseen: Tensor) -> Tensor:
        """``[rows, 1, 1, tokens]``, minus infinity where ``[rows, tokens]`` is true, else 0."""
        bias = torch.zeros(unseen.shape, dtype=self._dtype, device=self._device)
        return bias.masked_fill_(unseen, -torch.inf)[:, None, None]

    def _draw(self, logits: Tensor, temperature: Tensor, key: Tensor, age: Tensor) -> Draw:
        if self._fused:
            return fused.draw(logits, temperature, key, age)  # converts on the way
        noise = gumbel(key, age[:, None], logits.shape[-1])
        each = torch.arange(len(age), device=self._device)
        return draw(logits.float(), temperature, noise, each)

    def _capture(self, sizes: Sizes) -> torch.cuda.CUDAGraph:
        """The step of a bucket as a graph; what it advances is left as it was."""
        advanced = self._token, self._age, self._at
        before = [tensor.clone() for tensor in advanced]

        def restore() -> None:
            for tensor, value in zip(advanced, before, strict=True):
                tensor.copy_(value)

        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UP):
                self._step(sizes)
                restore()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Graphs may share memory: one at a time is replayed, and nothing that a graph makes is
        # looked at after it but what it writes into our own tensors.
        # PyTorch doesn't leave the stream when a capture fails, so that is done around it.
        with torch.cuda.stream(current), torch.cuda.graph(graph, self._pool, self._side):
            self._step(sizes)
        return graph
