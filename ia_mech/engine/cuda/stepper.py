"""A batch in buffers of fixed size and address, and its decoding step.

A step embeds the newest token of every row, runs the model, draws the next tokens and sends what is
recorded about them to the host, without waiting for anything. On a GPU it may be captured as a CUDA
graph. The loop around it is in ``stream.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ia_mech.engine.cuda import fused
from ia_mech.engine.cuda.layers import STATIC, Sizes, View
from ia_mech.engine.prefill import Prefilled
from ia_mech.engine.sampling import Draw, draw, gumbel
from ia_mech.engine.shared_prefix import sharing

FIELDS = tuple(field.name for field in fields(Draw))
ROUND = 8  # capacities are multiples of this, as tensor cores need it in half precision
SPARE = 2  # prefixes held at a time, as a multiple of the contexts that fill the batch


@dataclass
class StaticBuffers:
    """Buffers for all batches of a phase of a run, so that each is decoded at the same addresses.

    They are made when the first row begins, and anew after :meth:`release` or for another width.

    Attributes:
        model: the subject model.
        contexts, rows: how many contexts there are in all, and rows of each, at most.
        longest, own: tokens of the longest context, and of a row, at most.
        graphs: steps are captured as CUDA graphs; needs a GPU.
    """

    model: PreTrainedModel
    contexts: int
    rows: int
    longest: int
    own: int
    graphs: bool = False
    _stepper: "Stepper | None" = None

    def sizes(self, width: int) -> Sizes:
        """For batches of ``width`` rows. A row that begins where one ended early needs a prefix
        slot for its context: there are :data:`SPARE` times as many as fill the batch."""
        slots = max(1, min(width, self.contexts * self.rows))
        rows = min(slots, self.rows)
        prefixes = min(self.contexts, slots, max(2, -(-SPARE * slots // rows)))
        return Sizes(slots, prefixes, rows, -(-self.longest // ROUND) * ROUND, self.own)

    def stepper(self, sizes: Sizes, group: Prefilled) -> "Stepper":
        """An empty batch; arguments and errors as for :class:`Stepper`."""
        if self._stepper is not None and self._stepper.sizes == sizes:
            self._stepper.reset()
        else:
            self.release()  # before the next one is made
            self._stepper = Stepper(self.model, sizes, group, self.graphs)
        return self._stepper

    def release(self) -> None:
        """Give the memory back."""
        self._stepper = None


class Stepper:
    """A batch of rows, all of whose tensors stay where they are.

    A prefilled ``group`` gives the shapes of the cache. With ``graphs`` the step is captured at
    once. Raises MemoryError where the device hasn't the memory.
    """

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, sizes: Sizes, group: Prefilled, graphs: bool = False
    ) -> None:
        self._model, self.sizes, self._device = model, sizes, group.logits.device
        layers: list[Any] = group.state.cache.layers
        shapes = [STATIC[type(layer)](layer, sizes, torch.device("meta")) for layer in layers]
        needed = sum(tensor.nbytes for layer in shapes for tensor in layer.tensors())
        free = free_bytes(self._device)
        if needed > free:  # some drivers would take the host's memory instead of failing
            gib = f"{needed / 2**30:.2f} GiB of {free / 2**30:.2f} free"
            raise MemoryError(f"out of memory: the batch's buffers need {gib}")
        self._layers = [STATIC[type(layer)](layer, sizes, self._device) for layer in layers]
        self._cache = DynamicCache(config=model.config)
        self._cache.layers = [*self._layers]

        numbers = partial(torch.zeros, dtype=torch.long, device=self._device)
        # Of each batch slot: its row's newest token, how many the row drew, the position of the
        # first one, temperature and Philox key.
        self._token, self._age, self._start = (numbers(sizes.slots) for _ in range(3))
        self._temperature = numbers(sizes.slots, dtype=torch.float32)
        self._key = numbers(sizes.slots, 2)
        # Of each prefix slot, the tokens of its context; and the tables of View.
        self._length = numbers(sizes.prefixes)
        self._gather, self._scatter = numbers(sizes.prefixes * sizes.rows), numbers(sizes.slots)
        self._drawn = numbers(len(FIELDS), sizes.slots, dtype=torch.float64)
        self.reset()
        self._graph = self._capture() if graphs else None

    @torch.inference_mode()
    def reset(self) -> None:
        """Empty the batch. No row reads what idle slots hold, but a mixture of experts counts them
        in."""
        for tensor in (self._token, self._start, self._temperature, self._key):
            tensor.zero_()
        self._age.fill_(1)
        self._length.fill_(1)  # of a free prefix slot: no softmax over nothing
        for layer in self._layers:
            layer.reset()

    # -- between steps --------------------------------------------------------------------------

    @torch.inference_mode()
    def put_prefixes(self, slots: Sequence[int], group: Prefilled, contexts: Sequence[int]) -> None:
        """Copy contexts of a prefilled group to prefix slots."""
        slot, context = self._sent(torch.tensor(slots), torch.tensor(contexts))
        padding = (group.state.mask[context].cumsum(-1) == 0).sum(-1)
        for ours, theirs in zip(self._layers, group.state.cache.layers, strict=True):
            ours.put_prefixes(slot, theirs, context, padding)
        self._length[slot] = group.state.mask.shape[1] - padding

    @torch.inference_mode()
    def begin(
        self,
        slots: Sequence[int],
        prefixes: Sequence[int],
        group: Prefilled,
        index: Tensor,
        temperature: Tensor,
        key: Tensor,
    ) -> Callable[[], Tensor]:
        """Rows draw their first token and begin in batch slots ``[rows]``.

        ``prefixes`` ``[rows]`` are the prefix slots of their contexts, ``index`` ``[rows]`` int64
        which of the group's contexts these are; ``temperature`` ``[rows]`` float32 is 0 for greedy
        rows, ``key`` ``[rows, 2]`` int64 that of their noise. Returns what :meth:`step` does.
        """
        tables = torch.tensor(slots), torch.tensor(prefixes)
        at, prefix, index, temperature, key = self._sent(*tables, index, temperature, key)
        for ours, theirs in zip(self._layers, group.state.cache.layers, strict=True):
            ours.begin(at, theirs, index)
        drawn = self._draw(group.logits[index], temperature, key, torch.zeros_like(at))
        self._token[at] = drawn.token
        self._age[at] = 1
        self._start[at] = self._length[prefix]
        self._temperature[at] = temperature
        self._key[at] = key
        return start_copy(_stacked(drawn))

    @torch.inference_mode()
    def keep(self, slots: Sequence[int]) -> None:
        """These batch slots become the first ones."""
        (index,) = self._sent(torch.tensor(slots))
        for tensor in (self._token, self._age, self._start, self._temperature, self._key):
            tensor[: len(slots)] = tensor[index]
        for layer in self._layers:
            layer.keep(index)

    @torch.inference_mode()
    def put_tables(self, gather: np.ndarray, scatter: np.ndarray) -> None:
        """Which batch slots continue which prefix; see :class:`View`."""
        for ours, table in ((self._gather, gather), (self._scatter, scatter)):
            ours[: len(table)] = self._sent(torch.from_numpy(table))[0]

    def _sent(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of the host on the device, which copies them without the host waiting."""
        if self._device.type == "cuda":
            tensors = tuple(tensor.pin_memory() for tensor in tensors)
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]

    # -- steps ----------------------------------------------------------------------------------

    def part(self, slots: int) -> Sizes:
        """What a step of the first ``slots`` batch slots uses; a graph always uses all."""
        if self._graph is not None:
            return self.sizes
        return replace(self.sizes, slots=slots, rows=min(self.sizes.rows, slots))

    @torch.inference_mode()
    def step(self, part: Sizes) -> Callable[[], Tensor]:
        """Draw one token in each batch slot of a :meth:`part`: ``[fields, slots]`` float64, which
        holds ids, ranks and float32 alike; fields as :data:`FIELDS`."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step(part)
        return start_copy(self._drawn[:, : part.slots].clone())

    def _step(self, part: Sizes) -> None:
        n = part.slots
        token, age = self._token[:n], self._age[:n]
        # A row that ended goes on until the host sees it; what it writes then is never read.
        place = (age - 1).clamp(max=part.own_capacity - 1)
        gather = self._gather[: part.prefixes * part.rows]
        view = View(part, place, self._length, gather, self._scatter[:n])
        for layer in self._layers:
            layer.look(view)
        with sharing(self._model, self._cache):
            output = self._model(
                input_ids=token[:, None],
                position_ids=(self._start[:n] + place)[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
        drawn = self._draw(output.logits[:, -1], self._temperature[:n], self._key[:n], age)
        self._drawn[:, :n].copy_(_stacked(drawn))
        token.copy_(drawn.token)
        age.add_(1)

    def _draw(self, logits: Tensor, temperature: Tensor, key: Tensor, age: Tensor) -> Draw:
        if fused.available(self._device):
            return fused.draw(logits, temperature, key, age)  # converts on the way
        # Noise once per row, not per stream: to find equal streams the host would have to wait.
        noise = gumbel(key, age[:, None], logits.shape[-1])
        return draw(logits.float(), temperature, noise, torch.arange(len(age), device=self._device))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The step of the whole batch as a graph."""
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._warm_up()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be writing earlier results, which is no part of the graph. PyTorch
        # doesn't leave the stream when a capture fails, so that is done around it.
        capture = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(current), capture:
            self._step(self.sizes)
        return graph

    def _warm_up(self) -> None:
        """Make a step, in which libraries make what they make on first use, and empty the batch."""
        self._step(self.sizes)
        self.reset()


def _stacked(drawn: Draw) -> Tensor:
    return torch.stack([getattr(drawn, name).double() for name in FIELDS])


def start_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host, which goes on.

    Returns:
        A function that waits for the copy and returns it; of a tensor on the CPU, the tensor.
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    with torch.cuda.device_of(tensor):
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return pinned

    return wait


def free_bytes(device: torch.device) -> float:
    """Memory of a GPU for new tensors, PyTorch's own reserve included; a CPU's isn't limited."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
