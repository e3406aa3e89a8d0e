"""Our engine: the whole job, decoding alone, capture, growth, memory, and rows that differ."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sampling.limits import least
from benchmarks.sampling.workload import Contender, Workload, rows_of
from ia_mech.engine.loop import Decoded
from ia_mech.engine.prefill import Prefilled, expand
from ia_mech.errors import UserError
from ia_mech.models.load import text_config

PAIRS = 10  # of prefills with and without capture, per round
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Ours(Contender):
    """The whole job; without ``share`` every row copies its context's keys and values."""

    def __init__(
        self, work: Workload, contexts: int, share: bool = True, graphs: bool = False
    ) -> None:
        super().__init__(work, contexts)
        if graphs and not work.on_gpu:
            raise UserError("CUDA graphs need a GPU", "use --device cuda")
        engine = work.checked("graphs") if graphs else work.engine
        self.share, self.graphs = share, graphs
        self.notes = str(engine) if share else "portable"

    def run(self, new_tokens: int) -> None:
        decoded = self.work.whole_job(self.contexts, new_tokens, self.share, self.graphs)
        self.work.written["ours" if self.share else "portable", self.contexts] = decoded


class Decoding(Contender):
    """Decoding alone, of prefilled contexts; and the work that no engine can avoid."""

    def run(self, new_tokens: int) -> object:
        return self.measure()

    def measure(self) -> dict[str, Any]:
        work, size = self.work, self.work.size
        groups = list(work.prefilled(work.ids[: self.contexts], capture=False))
        rows = work.rows(self.contexts)
        taken = self.seconds(
            lambda: work.decode(groups, rows, size.new_tokens, size.context_tokens)
        )
        moved, computed = least(work.model, groups[0].state.cache, size, self.contexts)
        return {"seconds": taken, "least_bytes": moved, "least_operations": computed}


class Capture(Contender):
    """Prefills without and with capture of all layers, taking turns; lists of seconds."""

    def run(self, new_tokens: int = 0, capture: bool = True) -> object:
        return list(self.work.prefilled(self.work.ids[: self.contexts], capture))

    def measure(self) -> dict[str, Any]:
        taken: dict[str, list[float]] = {"plain": [], "captured": []}
        for _ in range(PAIRS):
            taken["plain"].append(self.seconds(lambda: self.run(capture=False)))
            taken["captured"].append(self.seconds(self.run))
        return taken


class Growth(Contender):
    """One context: prefill and decoding as rows, new tokens or the context grow."""

    def __init__(self, work: Workload, contexts: int) -> None:
        super().__init__(work, contexts)
        rows, new, tokens = work.size.rows, work.size.new_tokens, work.size.context_tokens
        points = [(rows, new, tokens)]  # what the others are compared with
        points += [(more, new, tokens) for more in (rows // 4, rows // 2, 2 * rows, 4 * rows)]
        points += [(rows, more, tokens) for more in (new // 4, new // 2, 2 * new)]
        points += [(rows, new, more) for more in (tokens // 2, 2 * tokens)]
        self.points = [point for point in points if min(point) > 1]
        self.ids = work.contexts(1, 2 * tokens)[0]

    def run(self, new_tokens: int) -> object:
        return self.measure()

    def warm_up(self) -> None:
        if self.work.engine.static:  # whose buffers are made for each size
            self.measure()

    def measure(self) -> dict[str, Any]:
        return {"points": [self._point(*point) for point in self.points]}

    def _point(self, rows: int, new_tokens: int, context_tokens: int) -> dict[str, Any]:
        work, ready = self.work, list[Prefilled]()
        ids, chosen = [self.ids[-context_tokens:]], rows_of(0, rows)
        prefill = self.seconds(lambda: ready.extend(work.prefilled(ids, capture=True)))
        decode = self.seconds(lambda: work.decode(ready, chosen, new_tokens, context_tokens))
        shape = {"rows": rows, "new_tokens": new_tokens, "context": context_tokens}
        return shape | {"prefill": prefill, "decode": decode}


class Memory(Contender):
    """Bytes of keys and values. It has a process of its own, whose memory nothing else touched.

    ``expected``: every context once and every row's own tokens. ``caches``: the tensors in the
    caches; unknown of static buffers. ``peak``: by how much the process (on a GPU: what
    PyTorch allocates there) grows in a prefill and the decoding after it; unknown outside Linux.
    """

    def __init__(self, work: Workload, contexts: int, share: bool = True) -> None:
        super().__init__(work, contexts)
        self.share = share and work.engine.shared > 0

    def warm_up(self) -> None:
        """A few rows, so that what is made once exists: reordered weights, memory of threads."""
        groups = self.work.prefilled(self.work.ids[:1], capture=True)
        self.work.decode(groups, rows_of(0, 2), 2, self.work.size.context_tokens, self.share)

    def run(self, new_tokens: int) -> object:
        return self.work.whole_job(self.contexts, new_tokens, self.share)

    def measure(self) -> dict[str, Any]:
        work, size, on_gpu = self.work, self.work.size, self.work.on_gpu
        before = torch.cuda.memory_allocated() if on_gpu else reset_peak()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.run(size.new_tokens)
        after = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
        static = self.share and work.engine.static
        tokens = self.contexts * (size.context_tokens + size.rows * size.new_tokens)
        return {
            "expected": bytes_per_token(work.model) * tokens,
            "caches": None if static else self._in_caches(),
            "peak": None if before is None or after is None else after - before,
        }

    def _in_caches(self) -> int:
        """Of the prefilled and the expanded state."""
        work, roots = self.work, list[object]()
        for group in work.prefilled(work.ids[: self.contexts], capture=False):
            index = torch.arange(group.state.rows, device=work.device)
            index = index.repeat_interleave(work.size.rows)
            state = expand(group.state, index, capacity=work.size.new_tokens, share=self.share)
            roots += [group.state.cache.layers, state.cache.layers]
        return held_bytes(roots)


def reset_peak() -> int | None:
    """The process's resident bytes, from which its peak is counted anew; None if not on Linux."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    return resident("VmRSS")


def resident(name: str) -> int | None:
    """A line of ``/proc/self/status``, in bytes; None if there is none."""
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


def bytes_per_token(model: Any) -> int:
    """Of keys and values in all layers that attend, by the configuration."""
    config = text_config(model.config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)
    return 2 * layers * heads * width * model.dtype.itemsize


def held_bytes(roots: Iterable[object]) -> int:
    """Bytes of the distinct storages of all tensors that can be reached from some objects.

    Attributes, lists, tuples, sets and dictionaries are followed; modules of a model are not.
    """
    storages: dict[tuple[torch.device, int], int] = {}
    seen, ahead = set[int](), list(roots)
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, nn.Module | type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            storages[one.device, storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list | tuple | set):
            ahead += one
        elif hasattr(one, "__dict__"):
            ahead += vars(one).values()
    return sum(storages.values())


def differing(work: Workload) -> list[dict[str, Any]]:
    """Rows that should be equal: of both engines, and alone against among all contexts' rows.

    Returns:
        ``what`` was compared, how many ``rows``, and ``margins`` (see :func:`first_differences`).
    """
    rows, few, many = work.size.rows, work.size.counts[0], work.size.counts[-1]
    pairs = {
        f"shared and portable engine, {count * rows} rows": (("ours", count), ("portable", count))
        for count in work.size.counts
    }
    if few < many:
        within = f"{few * rows} rows alone and among {many * rows}"
        pairs[f"{within}, shared"] = (("ours", few), ("ours", many))
        pairs[f"{within}, portable"] = (("portable", few), ("portable", many))
    found = []
    for what, (one, other) in pairs.items():
        if one in work.written and other in work.written:
            alone, among = work.written[one], work.written[other]
            margins = first_differences(alone, among[: len(alone)])
            found.append({"what": what, "rows": len(alone), "margins": margins})
    return found


def first_differences(one: Sequence[Decoded], other: Sequence[Decoded]) -> list[float]:
    """Of rows whose tokens differ: the margin at the first that does, the larger of the two."""
    margins = []
    for a, b in zip(one, other, strict=True):
        unequal = (a.token_ids != b.token_ids).nonzero()[0]
        if len(unequal):
            margins.append(float(max(a.margins[unequal[0]], b.margins[unequal[0]])))
    return margins
