"""Let rows attend to their context's keys and values where the prefill left them.

If 33 rows each had a copy of a prefix of 231 tokens, it would be read 33 times at each step; on a
CPU that takes half as long as the matrix products. Here each layer of full attention refers to the
prefill's tensors. The rows of a context become the rows of one matrix per key-value head, and all
contexts of a group are one batched product. Each row also attends to its own tokens, and the two
parts are merged by their log-sum-exp (Hydragen, arXiv 2402.05099, section 3.1). Nothing is
approximated. So do layers with a sliding window, where prefix and new tokens lie within it. Other
sliding windows and recurrent states are copied and computed as usual.

The model's code isn't touched: ``transformers`` lets attention functions be registered by name
(``installed.py``).

The file holds, in order: attention over parts (:func:`attend`, :func:`merge`), a table of which row
goes on from which context (:class:`PrefixTable`), the cache layer (:class:`SharedLayer`), and the
function that a model's attention calls with its keys (:func:`attend_shared`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ia_mech.engine.sampling import LOG2_E
from ia_mech.errors import UserError

FUSED = (torch.float32, torch.bfloat16, torch.float16)  # what PyTorch's kernel for CPUs takes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one set of keys, without padding.

    Args:
        query: ``[batch, heads, new, dim]``.
        key: ``[batch, kv_heads, keys, dim]``; each key-value head serves ``heads / kv_heads`` query
            heads, in order.
        value: ``[batch, kv_heads, keys, value_dim]``.
        scaling: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        bias: ``[batch or 1, 1, new or 1, keys]`` in the query's dtype, added to the scores; minus
            infinity hides a key.

    Returns:
        The average of the values ``[batch, heads, new, value_dim]`` in the query's dtype, and the
        log-sum-exp of the scores ``[batch, heads, new]`` float32. A query that sees no key has an
        average of zero and a log-sum-exp of minus infinity.
    """
    fused = query.device.type == "cpu" and query.dtype in FUSED and softcap is None
    # With one query per set of keys, the kernel would do many small products one by one.
    if fused and query.shape[2] > 1 and query.shape[-1] == value.shape[-1]:
        # scaled_dot_product_attention calls this on a CPU, and doesn't return the log-sum-exp.
        each = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        average, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=each, scale=scaling
        )
        if bias is not None:  # it gives a log-sum-exp of 0 to a query that sees nothing
            total = total.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return average, total
    batch, heads, new, dim = query.shape
    # Products are summed in float32 and stay in it: rounded to half precision, large scores would
    # be further off than those of the attention that this is compared with.
    folded, key, value = (x.float() for x in (query, key, value))
    # [batch, kv_heads, heads per kv_head * new, …]
    folded = folded.reshape(batch, key.shape[1], -1, dim)
    scores = (folded @ key.mT).mul_(scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        per_head = scores.view(batch, heads, new, -1)
        per_head += bias
    top = scores.amax(-1, keepdim=True)
    # Minus infinity minus itself would be NaN.
    scores -= top.clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.mul_(LOG2_E).exp2_()  # as in sampling.log_sum_exp
    total = weights.sum(-1, keepdim=True)
    average = (weights.div_(total.clamp(min=1.0)) @ value).to(query.dtype)
    return average.view(batch, heads, new, -1), (top + total.log()).view(batch, heads, new)


def merge(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], sinks: Tensor | None = None
) -> Tensor:
    """Attention over all keys, put together from attention over two parts of them.

    Args:
        first: as :func:`attend` returns it.
        second: the same over the other keys.
        sinks: ``[heads]`` scores of keys without a value (gpt-oss); they only take weight away.

    Returns:
        ``[batch, heads, new, value_dim]`` in the first part's dtype, computed in float32; zero for
        a query that sees no key.
    """
    (average, total), (other, other_total) = first, second
    # NaN only for a query that sees no key in either part.
    weight = torch.sigmoid(other_total - total).nan_to_num_(0.0)
    merged = torch.lerp(average.float(), other.float(), weight[..., None])
    if sinks is not None:
        seen = torch.logaddexp(total, other_total) - sinks.float()[:, None]
        merged = merged * torch.sigmoid(seen)[..., None]
    return merged.to(average.dtype)


@dataclass(frozen=True)
class Borrowed:
    """Keys and values of another context, to which a row attends in some layers in place of its own
    context's.

    The row still attends to its own tokens, written after the prefix. Keys keep the positions that
    they were computed at. The prefill stays as it was, with the logits of the first token: only the
    tokens that follow borrow.

    Attributes:
        context: the number of the context that they are taken from, counted through all groups.
        layers: the layers in which the row attends to it (l, from 1: inside block l).
    """

    context: int
    layers: Sequence[int]


@dataclass(frozen=True)
class _GroupRows:
    """The rows of one group's contexts.

    Attributes:
        contexts: those of the group from the first to the last that has rows.
        rows: ``[contexts, most]`` int64, the rows of each context; filled up with row 0.
        bias: ``[contexts, 1, 1, tokens]`` in the model's dtype, minus infinity at left padding;
            None without padding.
    """

    contexts: slice
    rows: Tensor
    bias: Tensor | None


class PrefixTable:
    """Which row goes on from which context: one table for all shared layers of a cache.

    Rows that join later (:meth:`join`) have fewer tokens of their own.

    Args:
        masks: of each group ``[contexts, tokens]``, 0 for left padding.
        contexts: ``[rows]``, the number of each row's context, counted through all groups.
        borrowed: for each row, what it borrows, or None; empty where no row does.
        dtype: the model's.
        width: tokens of the longest row's context, padding included.

    Attributes:
        ages: how many own tokens each row has.
        width: tokens of the longest row, its prefix included.
        borrowers: the rows that borrow, and what.
    """

    def __init__(
        self,
        masks: Sequence[Tensor],
        contexts: Sequence[int],
        borrowed: Sequence[Borrowed | None],
        dtype: torch.dtype,
        width: int,
    ) -> None:
        self._masks, self._dtype = masks, dtype
        self._contexts = list(contexts)
        self.borrowers = [(row, one) for row, one in enumerate(borrowed) if one is not None]
        self.ages, self.width = [0] * len(self._contexts), width
        self._drop_tensors()

    def __len__(self) -> int:
        return len(self._contexts)

    def _drop_tensors(self) -> None:
        """Forget all tensors; they are made again when they are asked for."""
        self._group_rows: dict[torch.device, tuple[list[_GroupRows | None], Tensor]] = {}
        self._own_bias: dict[torch.device, Tensor | None] = {}
        self._own_places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def age(self) -> int:
        """How many own tokens the oldest row has."""
        return max(self.ages, default=0)

    def advance(self, new: int) -> None:
        """Note that every row has so many more tokens."""
        self.ages = [age + new for age in self.ages]
        self.width += new
        self._own_bias, self._own_places = {}, {}

    def join(self, other: "PrefixTable", width: int) -> None:
        """Append the rows of another table of the same groups, which borrow nothing; the longest
        row then has ``width`` tokens."""
        self._contexts += other._contexts
        self.ages, self.width = self.ages + other.ages, width
        self._drop_tensors()

    def keep(self, index: Sequence[int]) -> None:
        """Keep only the given rows, in the given order."""
        place = {row: at for at, row in enumerate(index)}
        self.borrowers = [(place[row], one) for row, one in self.borrowers if row in place]
        self._contexts = [self._contexts[row] for row in index]
        self.ages = [self.ages[row] for row in index]
        self._drop_tensors()

    def group_rows(self, device: torch.device) -> tuple[list[_GroupRows | None], Tensor]:
        """Where the rows of each group are, on a layer's device.

        Returns:
            For each group its rows, or None if none is left; and ``[rows + borrowers]`` int64
            places in the groups' attention, ``[contexts * most]`` each, one below the other: first
            of each row's attention to its own prefix, then of each borrower's to the borrowed one.
        """
        if device not in self._group_rows:
            self._group_rows[device] = self._make_group_rows(device)
        return self._group_rows[device]

    def _make_group_rows(self, device: torch.device) -> tuple[list[_GroupRows | None], Tensor]:
        pairs = list(enumerate(self._contexts))
        pairs += [(row, one.context) for row, one in self.borrowers]
        of: dict[int, list[int]] = {}  # context → places in pairs
        for place, (_, context) in enumerate(pairs):
            of.setdefault(context, []).append(place)
        groups: list[_GroupRows | None] = []
        back, first, before = [0] * len(pairs), 0, 0
        for mask in self._masks:
            mine = [of.get(first + number, []) for number in range(len(mask))]
            first += len(mask)
            used = [number for number, places in enumerate(mine) if places]
            if not used:
                groups.append(None)
                continue
            contexts = slice(used[0], used[-1] + 1)
            mine, mask = mine[contexts], mask[contexts]
            most = max(map(len, mine))
            rows = torch.zeros(len(mask), most, dtype=torch.long)
            for number, places in enumerate(mine):
                for at, place in enumerate(places):
                    rows[number, at] = pairs[place][0]
                    back[place] = before + number * most + at
            before += rows.numel()
            bias = None
            if not mask.all():
                hidden = (mask == 0)[:, None, None].to(device)
                bias = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
                bias.masked_fill_(hidden, -torch.inf)
            groups.append(_GroupRows(contexts, rows.to(device), bias))
        return groups, torch.tensor(back, device=device)

    def own_places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two ``[rows]`` int64: each row's number, and the place of its next token."""
        if device not in self._own_places:
            ages = torch.tensor(self.ages, device=device)
            self._own_places[device] = torch.arange(len(ages), device=device), ages
        return self._own_places[device]

    def own_bias(self, new: int, device: torch.device) -> Tensor | None:
        """``[rows or 1, 1, new, age + new]``: minus infinity where a new token would see a later
        one, or a place that its row hasn't filled; None where each sees all."""
        if device not in self._own_bias:
            bias = None
            if new > 1 or len(set(self.ages)) > 1:
                at = torch.arange(self.age + new)
                ages = torch.tensor(self.ages[:1] if new > 1 else self.ages)
                hidden = at > ages[:, None, None] + torch.arange(new)[:, None]
                bias = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill(hidden, -torch.inf)
                bias = bias[:, None].to(device)
            self._own_bias[device] = bias
        return self._own_bias[device]


ATTRIBUTE = "shared_layer"  # keys that a shared layer handed out hold the layer under this name

UNUSED = "its attention doesn't use the cached keys as they are"


@dataclass(frozen=True)
class Engine:
    """How a model's rows attend to their prefix.

    Attributes:
        shared: the layers, counted from 1, in which rows read the prefix where the prefill left it.
        within: layers with a sliding window, in which rows do so as long as it holds prefix and new
            tokens. In other cases and layers each row has a copy, or a state of its own.
        layers: how many layers the model has.
        why: why no layer shares; empty otherwise.
        ignored: what the start-up check found and the user chose to ignore; empty otherwise.
        captured: whether decoding steps are captured as CUDA graphs (``captured.py``).
        uncaptured: why they aren't; empty on a CPU.
    """

    shared: tuple[int, ...]
    layers: int
    within: tuple[int, ...] = ()
    why: str = ""
    ignored: str = ""
    captured: bool = False
    uncaptured: str = ""

    @classmethod
    def possible(cls, model: PreTrainedModel) -> "Engine":
        """As many shared layers as the model's architecture allows."""
        layers = DynamicCache(config=model.config).layers
        full, sliding = (
            tuple(n for n, layer in enumerate(layers, start=1) if type(layer) is kind)
            for kind in (DynamicLayer, DynamicSlidingWindowLayer)
        )
        why = "" if full or sliding else "no layer has attention over kept keys"
        return cls(full, len(layers), sliding, why)

    @property
    def share(self) -> bool:
        """Whether any layer shares."""
        return bool(self.shared or self.within)

    def shares(self, layer: object, number: int, tokens: int, new: int) -> TypeGuard[DynamicLayer]:
        """Whether rows share a prefilled layer, where the longest context has so many ``tokens``,
        padding included, and most ``new`` ones are fed to a row."""
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
            return False
        if isinstance(layer, DynamicSlidingWindowLayer):
            # A window of one token less is what the prefill has kept.
            return number in self.within and tokens + max(new, 1) <= layer.sliding_window
        return number in self.shared

    @property
    def name(self) -> str:
        """The engine in the words that a run records."""
        if not self.share:
            return "a copy of the prefix per row"
        if len(self.shared) == self.layers:
            return f"prefix shared in all {self.layers} layers"
        where = []
        if self.shared:
            where.append(f"layers {_ranges(self.shared)} of {self.layers}")
        if self.within:
            where.append(f"layers {_ranges(self.within)} where it lies within their window")
        rest = len(self.shared) + len(self.within) < self.layers
        return f"prefix shared in {' and '.join(where)}{', copied in others' if rest else ''}"

    def __str__(self) -> str:
        steps = "; steps are captured" if self.captured else ""
        steps = f"; steps aren't captured ({self.uncaptured})" if self.uncaptured else steps
        return f"{self.name} ({self.why}){steps}" if self.why else f"{self.name}{steps}"


def _ranges(numbers: Sequence[int]) -> str:
    """``1-3, 5`` for 1, 2, 3 and 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, one)) for one in found)


def held(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values ``[rows, kv_heads, tokens, dim]`` of a prefilled layer."""
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


class SharedLayer(DynamicLayer):
    """A cache layer whose tokens see all before them: it refers to the prefixes and holds what rows
    add to them.

    ``keys`` and ``values`` are views of the rows' own tokens only, ``[rows, kv_heads, own, dim]``;
    lengths and mask sizes count the longest prefix as well, padding included.

    Args:
        prefixes: this layer of each prefilled group, left as it is.
        table: the batch's, the same for all layers of a cache.
        number: the layer's, from 1.
        room: most tokens that a row may add.
        places: most rows that there may be.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self,
        prefixes: Sequence[DynamicLayer],
        table: PrefixTable,
        number: int,
        room: int,
        places: int,
    ) -> None:
        super().__init__()
        self.prefixes = [held(layer) for layer in prefixes]
        self.table, self.number, self._places = table, number, places
        keys, _ = self.prefixes[0]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._own, self._room = self._empty(0), room  # made when the first token comes
        self._waiting = False  # whether handed-out keys still wait for an attention function
        self._set_views(0)

    def _empty(self, room: int) -> list[Tensor]:
        return [
            tensor.new_zeros(self._places, tensor.shape[1], room, tensor.shape[-1])
            for tensor in self.prefixes[0]
        ]

    def _set_views(self, tokens: int) -> None:
        self.keys, self.values = (own[: len(self.table), :, :tokens] for own in self._own)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, kv_heads, new, dim]``; returns the rows' own ones.

        If rows have different ages, each gets one new token.

        Raises:
            RuntimeError: the model's attention didn't use what was returned the last time.
        """
        self.check_used()
        start = self.table.age
        end = start + key_states.shape[2]
        if not self._own[0].shape[2]:
            self._own = self._empty(self._room)
        for own, states in zip(self._own, (key_states, value_states), strict=True):
            if len(set(self.table.ages)) == 1:
                own[: len(states), :, start:end] = states
            else:
                row, at = self.table.own_places(own.device)
                own[row, :, at] = states[:, :, 0]
        self._set_views(end)
        self._waiting = True
        # A view of its own carries this layer, since attention functions don't get the cache. It
        # isn't kept, or the two would keep each other alive.
        keys = self.keys[:]
        setattr(keys, ATTRIBUTE, self)
        return keys, self.values

    def check_used(self) -> None:
        """Raise RuntimeError if keys were handed out that no attention function has used."""
        if self._waiting:
            raise RuntimeError(UNUSED)

    def get_seq_length(self) -> int:
        return self.table.width + max(0, self.keys.shape[2] - self.table.age)

    def join(self) -> None:
        """Take in the rows that the table has taken in; they have no token of their own yet."""
        self._set_views(self.table.age)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in the given order, moving only those that change their place; the
        prefixes stay where they are. The caller updates the table. The index is on the host, so
        that no layer waits for a device."""
        moved = (beam_idx != torch.arange(len(beam_idx))).nonzero()[:, 0]
        to, source, tokens = (
            moved.to(self.device),
            beam_idx[moved].to(self.device),
            self.keys.shape[2],
        )
        for own in self._own:
            own[to, :, :tokens] = own[source, :, :tokens]
        self._set_views(self.table.age)

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
        """Attention ``[rows, heads, new, value_dim]`` of queries ``[rows, heads, new, dim]`` over
        the prefixes and the rows' own ``key`` and ``value`` ``[rows, kv_heads, own, …]``."""
        if window is not None and self.get_seq_length() > window:
            raise NotImplementedError("the layer's keys aren't kept for this sliding window")
        self._waiting = False
        bias = self.table.own_bias(query.shape[2], query.device)
        own = attend(query, key, value, scaling=scaling, softcap=softcap, bias=bias)
        return merge(self._attend_prefixes(query, scaling, softcap), own, sinks)

    def _attend_prefixes(
        self, query: Tensor, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of the rows over their contexts, as :func:`attend` returns it."""
        groups, back = self.table.group_rows(query.device)
        rows, heads, new, dim = query.shape
        averages, totals = [], []
        for (keys, values), group in zip(self.prefixes, groups, strict=True):
            if group is None:
                continue
            keys, values = keys[group.contexts], values[group.contexts]
            contexts, most = group.rows.shape
            kv_heads = keys.shape[1]
            # Rows, the heads that share keys, and new tokens become the rows of one matrix per
            # context and key-value head.
            folded = query[group.rows.flatten()].reshape(contexts, most, kv_heads, -1, dim)
            folded = folded.transpose(1, 2).reshape(contexts, kv_heads, -1, dim)
            bias = group.bias
            average, total = attend(
                folded, keys, values, scaling=scaling, softcap=softcap, bias=bias
            )
            shape = contexts, kv_heads, most, heads // kv_heads, new
            averages.append(
                average.reshape(*shape, -1)
                .transpose(1, 2)
                .reshape(-1, heads, new, values.shape[-1])
            )
            totals.append(total.reshape(shape).transpose(1, 2).reshape(-1, heads, new))
        average, total = torch.cat(averages)[back], torch.cat(totals)[back]
        for place, (row, one) in enumerate(self.table.borrowers, start=rows):
            if self.number in one.layers:
                average[row], total[row] = average[place], total[place]
        return average[:rows], total[:rows]


def check_borrowed(borrowed: Sequence[Borrowed | None], layers: Sequence[object]) -> None:
    """Refuse to borrow where rows don't share their prefix.

    Raises:
        UserError: names the layers.
    """
    shared = [n for n, layer in enumerate(layers, start=1) if isinstance(layer, SharedLayer)]
    for one in filter(None, borrowed):
        if lacking := sorted({*one.layers} - {*shared}):
            raise UserError(
                f"layer {_ranges(lacking)} can't be borrowed: rows share their prefix in layers "
                f"{_ranges(shared) or '(none)'}",
                "name layers whose prefix is shared",
            )


def is_shared(key: Tensor) -> bool:
    """Whether keys were handed out by a shared layer."""
    return hasattr(key, ATTRIBUTE)


def attend_shared(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention ``[rows, new, heads, dim]`` over a shared layer, as ``transformers`` calls it."""
    output = getattr(key, ATTRIBUTE).attend(
        *(query, key, value),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
    )
    return output.transpose(1, 2).contiguous(), None
