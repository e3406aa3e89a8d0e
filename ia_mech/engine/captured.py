"""Decoding steps that are captured as CUDA graphs. This file needs Triton; only CUDA imports it.

What a step launches must not depend on its rows. So each row keeps the *place* of its own keys and
values as long as it is decoded: rows that end or join move nothing. What differs from step to step
are numbers in tensors that stay: the rows' tokens, places and ages, and where the prefixes are. A
batch is filled up to one of a few widths with rows that nobody reads. The step of each width is
captured once. Tensors and graphs are kept for the next decoding that they suffice for.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ia_mech.engine.attend_kernel import Prefixes, Tiling, attend, tiles
from ia_mech.engine.draw_kernel import draw
from ia_mech.engine.installed import installed
from ia_mech.engine.memory import kept
from ia_mech.engine.passes import Pass, making, on_block
from ia_mech.engine.sampling import Draw
from ia_mech.engine.shared import ATTRIBUTE, held
from ia_mech.engine.state import Prefilled
from ia_mech.engine.steps import Row, Steps
from ia_mech.errors import is_out_of_memory

UNIT = 8  # widths are multiples of it, so that kernels are compiled once for all


def rounded(number: int, unit: int = UNIT) -> int:
    """A number, or the next multiple of the unit."""
    return -(-number // unit) * unit


def width_of(rows: int, places: int) -> int:
    """The width of a batch: a multiple of a quarter of the power of two below its rows."""
    unit = max(UNIT, 1 << max(0, rows.bit_length() - 3))
    return min(rounded(places), rounded(rows, unit))


_capturing = threading.Lock()  # a process can capture one graph at a time


def capture(step: Callable[[], None], before: Any) -> Any:
    """A CUDA graph of a step, in the memory of the graph that was captured ``before``, if any."""
    step()  # on their first use, libraries take memory and kernels are compiled
    current, side = torch.cuda.current_stream(), _side_stream(torch.cuda.current_device())
    graph, pool = torch.cuda.CUDAGraph(), before.pool() if before else None
    # PyTorch goes on with the side stream after a capture that failed, and so would this thread.
    with _capturing, torch.cuda.stream(current):
        if before is None:  # PyTorch's allocator is of little use after a capture that failed
            _without_waiting(step)
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            step()
    return graph


@cache
def _side_stream(_device: int) -> Any:
    """The stream on which a device's graphs are captured; PyTorch has one for all devices."""
    return torch.cuda.Stream()


def _without_waiting(step: Callable[[], None]) -> None:
    """Raise RuntimeError if a step waits for the device, which no graph can hold."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that PyTorch may overlook some waiting
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def stepping(
    model: PreTrainedModel, groups: Sequence[Prefilled], rows: Sequence[Row], places: int, room: int
) -> Iterator["CapturedSteps"]:
    """Steps for one decoding, as ``steps.Steps``; arguments as for ``state.expand``."""
    numbers: _Numbers | None = kept.pop(model, None)
    contexts = sum(len(group.logits) for group in groups)
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.inference_mode(), torch.cuda.device_of(groups[0].logits):
        if numbers is None or not numbers.suffice(model, places, room, contexts):
            numbers = None  # frees its memory for the next
            # The next decoding may have some more contexts.
            most = max(UNIT, 1 << contexts.bit_length())
            numbers = _Numbers(model, groups[0], rounded(places), max(1, room), most)
        numbers.refer_to(groups)
        steps = CapturedSteps(model, groups, rows, places, room)
        steps.numbers = numbers
        yield steps
    if installed(model).engine.captured:  # and not after an error
        kept[model] = numbers


class _Layer(DynamicLayer):
    """A cache layer whose own keys and values ``[places, kv_heads, room, dim]`` the kernel writes.

    The model sees it empty: positions are given, and there is no mask.
    """

    def __init__(self, like: DynamicLayer, numbers: "_Numbers", room: int, prefix: Prefixes):
        super().__init__()
        self.sliding = getattr(like, "sliding_window", None)
        self.own = [
            one.new_zeros(numbers.places, one.shape[1], room, one.shape[3]) for one in held(like)
        ]
        self.numbers, self.prefix = weakref.proxy(numbers), prefix  # its tensors go with it

    def get_seq_length(self) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        keys = key_states[:]
        setattr(keys, ATTRIBUTE, self)
        return keys, value_states

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        """As ``shared.SharedLayer.attend``, for one new token."""
        if window != self.sliding:
            raise NotImplementedError("a layer keeps another window than it looks at")
        numbers, rows = self.numbers, len(query)
        count = numbers.most_tiles(rows)
        return attend(
            query[:, :, 0],
            key[:, :, 0],
            value[:, :, 0],
            self.own[0],
            self.own[1],
            self.prefix,
            numbers.tile_context[:count],
            numbers.tile_rows[:count],
            numbers.place[:rows],
            numbers.age[:rows],
            scaling=scaling,
            softcap=softcap,
            window=window,
            sinks=sinks,
        )[:, :, None]


class _Numbers:
    """The tensors that a model's steps read and write, and the graphs that do so.

    Args:
        model: the installed model.
        like: any of its prefilled groups.
        places: most rows at once.
        room: most tokens that are fed to a row.
        contexts: how many there may be.
    """

    def __init__(
        self, model: PreTrainedModel, like: Prefilled, places: int, room: int, contexts: int
    ) -> None:
        self.places, self.room, self.contexts = places, room, contexts
        self._weights = _addresses(model)
        layers: list[Any] = like.state.cache.layers
        device = like.logits.device
        heads = installed(model).config.num_attention_heads

        def numbers(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        shapes = [(*keys.shape[1::2], values.shape[3]) for keys, values in map(held, layers)]
        self.tile = min(Tiling.of(model.dtype, max(dims)).rows(heads // kv) for kv, *dims in shapes)
        self.tile_context = numbers(self.most_tiles(places), dtype=torch.int32)
        self.tile_rows = numbers(self.most_tiles(places), self.tile, dtype=torch.int32)
        self.place, self.age = numbers(2, places, dtype=torch.int32)
        self.token, self.position, self.step, self.drawn, self.rank = numbers(5, places)
        self.stream = numbers(places, 2)
        self.temperature, *drawn = numbers(4, places, dtype=torch.float32)
        self.draws = Draw(self.token, drawn[0], drawn[1], self.rank, drawn[2])
        self._addresses = numbers(len(layers), 3, contexts)
        self._bounds = numbers(len(layers), 2, contexts, dtype=torch.int32)
        self._cache = DynamicCache(config=model.config)
        self._cache.layers = [
            _Layer(layer, self, room, Prefixes(*addresses, *bounds))
            for layer, addresses, bounds in zip(layers, self._addresses, self._bounds, strict=True)
        ]
        self._graphs: dict[int, Any] = {}
        self._before: Any = None  # the graph that was captured last

    def suffice(self, model: PreTrainedModel, places: int, room: int, contexts: int) -> bool:
        """Whether rows can be decoded with these tensors, without much more memory than needed."""
        enough = places <= self.places and contexts <= self.contexts
        return enough and max(1, room) == self.room and _addresses(model) == self._weights

    def most_tiles(self, rows: int) -> int:
        """Each context may have a tile that isn't full."""
        return rounded(rows, self.tile) // self.tile + min(rows, self.contexts)

    def refer_to(self, groups: Sequence[Prefilled]) -> None:
        """Take note of where the contexts' keys and values are."""
        padding = [(group.state.mask == 0).sum(1).cpu().numpy() for group in groups]
        addresses = np.zeros(self._addresses.shape, np.int64)
        bounds = np.zeros(self._bounds.shape, np.int32)
        self._moved: list[Tensor] = []
        for layer in range(len(addresses)):
            first = 0
            for group, before in zip(groups, padding, strict=True):
                last = first + len(before)
                mine, cached = addresses[layer, :, first:last], group.state.cache.layers[layer]
                for at, states in enumerate(held(cast(DynamicLayer, cached))):
                    if states.stride()[2:] != (states.shape[3], 1):
                        states = states.contiguous()
                        self._moved.append(states)
                    step = states.stride(0) * states.itemsize
                    mine[at] = states.data_ptr() + step * np.arange(len(before))
                    mine[2] = states.stride(1) // states.shape[3]
                tokens = states.shape[2]
                passed = group.state.mask.shape[1] - tokens  # by a sliding window
                bounds[layer, 0, first:last] = np.maximum(before - passed, 0)
                bounds[layer, 1, first:last] = tokens
                first = last
        self._addresses.copy_(torch.from_numpy(addresses))
        self._bounds.copy_(torch.from_numpy(bounds))

    def fill(self, contexts: list[int], **numbers: Tensor) -> None:
        """Set the rows' contexts, and other numbers by the names of their tensors."""
        for name, values in numbers.items():
            getattr(self, name).zero_()[: len(values)] = values
        cut = tiles(contexts, self.tile)
        of, rows = np.full(len(self.tile_context), -1), np.full(self.tile_rows.shape, -1)
        for at, (context, members) in enumerate(cut):
            of[at], rows[at, : len(members)] = context, members
        self.tile_context.copy_(torch.from_numpy(of))
        self.tile_rows.copy_(torch.from_numpy(rows))

    def graph(self, model: PreTrainedModel, width: int) -> Any:
        """The captured step of a width. Capturing changes numbers: fill them after that."""
        if width not in self._graphs:
            self.tile_context.fill_(-1)
            step = partial(self._step, model, width)
            try:
                self._before = self._graphs[width] = capture(step, self._before)
            except Exception as error:  # a model may do anything that can't be captured
                if is_out_of_memory(error):
                    raise
                made, why = installed(model), str(error.__context__ or error)
                why = " ".join(why.split())[:120]
                made.engine = replace(made.engine, captured=False, uncaptured=why)
                self._graphs[width] = SimpleNamespace(replay=step)
        return self._graphs[width]

    def _step(self, model: PreTrainedModel, width: int) -> None:
        """Feed the rows their tokens and draw the next ones."""
        checked = on_block.set(None)  # graphs don't hold it
        one = Pass(installed(model).depth, 1, [0] * width, masked=False)
        on_block.reset(checked)
        with making(one):
            logits = model(
                input_ids=self.token[:width, None],
                position_ids=self.position[:width, None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[:, -1]
        for each in (self.position, self.step, self.age):
            each[:width].add_(1)
        draw(
            logits,
            self.temperature[:width],
            self.drawn[:width],
            self.stream[:width],
            self.step[:width],
            out=first_rows(self.draws, width),
        )


def _addresses(model: PreTrainedModel) -> list[int]:
    """Where a model's weights are, which graphs read there."""
    return [weight.data_ptr() for weight in model.parameters()]


def first_rows(draws: Draw, count: int) -> Draw:
    """The draws of the first rows."""
    return Draw(*(each[:count] for each in vars(draws).values()))


class CapturedSteps(Steps):
    """Steps that are captured. Nothing moves, so rows stay in their order."""

    numbers: _Numbers

    def __init__(self, *decoding) -> None:
        super().__init__(*decoding)
        self._positions = torch.cat([group.state.position for group in self._groups])
        self._contexts = torch.tensor([row.context for row in self._rows], device=self._device)
        self._free, self._place = list(range(self._places)), dict[int, int]()

    def draw(self, batch: list[int], length: np.ndarray) -> Draw:
        there = len(self._batch)
        draws = first_rows(self.numbers.draws, there)
        if begun := batch[there:]:
            at = torch.tensor(begun, device=self._device)
            about = self._temperatures[at], self._drawn[at], self._streams[at]
            first = draw(self._firsts[self._contexts[at]], *about, torch.zeros_like(at))
            pairs = zip(vars(draws).values(), vars(first).values(), strict=True)
            draws = Draw(*map(torch.cat, pairs))
            self._take_named(draws, batch, there)
        self._joined, self._batch = bool(begun), batch
        self._length, self._token = length, draws.token
        return draws

    def forward(self, staying: list[int]) -> list[int]:
        rows = [self._batch[at] for at in staying]
        if check := on_block.get():
            check()
        if rows and (self._joined or len(rows) < len(self._batch)):
            self._seat(rows, staying)
        self._batch = rows
        if rows:
            self._graph.replay()
        return staying

    def _seat(self, rows: list[int], staying: list[int]) -> None:
        """Give rows their places, and tell the tensors about them."""
        ended = self._place.keys() - set(rows)
        self._free += [self._place.pop(row) for row in sorted(ended)]
        for row in rows:
            if row not in self._place:
                self._place[row] = self._free.pop()
        at, token = torch.tensor(rows, device=self._device), self._token[staying]
        age = torch.from_numpy(self._length[staying]).to(self._device)
        self._graph = self.numbers.graph(self._model, width_of(len(rows), self._places))
        self.numbers.fill(
            [self._rows[row].context for row in rows],
            token=token,
            place=torch.tensor([self._place[row] for row in rows]),
            age=age,
            step=age,
            position=self._positions[self._contexts[at]] + age,
            temperature=self._temperatures[at],
            drawn=self._drawn[at],
            stream=self._streams[at],
        )
