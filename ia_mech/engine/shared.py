"""Rows that attend to their context's keys and values where the prefill left them.

Copied to every row, a prefix of 231 tokens is read 33 times over at each step of 33 rows, and on a
CPU that takes as long as half of the matrix products. Here each layer of full attention refers to
the prefill's tensors: the rows of a context become the rows of one matrix per key-value head, all
contexts of a group are one batched product, each row attends to its own tokens besides, and the two
parts are merged by their log-sum-exp (Hydragen, arXiv 2402.05099, section 3.1). Nothing is
approximated. Layers with a sliding window or a recurrent state are copied and computed as usual.

The model's code isn't touched: ``transformers`` lets attention functions be registered by name
(``installed.py``).

In this order: attention over parts (:func:`attend`, :func:`merge`), which row goes on from which
context (:class:`PrefixTable`), the cache layer (:class:`SharedLayer`), and the function that a
model's attention calls with its keys (:func:`attend_shared`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

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
        key: ``[batch, kv_heads, keys, dim]``; each head of it serves ``heads / kv_heads`` others,
            in order.
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
    # One query to each set of keys are many small products, which the kernel does one by one.
    if fused and query.shape[2] > 1 and query.shape[-1] == value.shape[-1]:
        # What scaled_dot_product_attention calls on a CPU; it keeps the log-sum-exp to itself.
        each = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        average, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=each, scale=scaling
        )
        if bias is not None:  # where nothing is seen it gives a log-sum-exp of zero
            total = total.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return average, total
    batch, heads, new, dim = query.shape
    # Products are added up in float32 and stay in it: rounded to half precision, large scores would
    # be off by more than what they are compared with.
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
    # Minus infinity less itself would be no number.
    scores -= top.clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.mul_(LOG2_E).exp2_()  # as in sampling.log_sum_exp
    total = weights.sum(-1, keepdim=True)
    average = (weights.div_(total.clamp(min=1.0)) @ value).to(query.dtype)
    return average.view(batch, heads, new, -1), (top + total.log()).view(batch, heads, new)


def merge(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], sinks: Tensor | None = None
) -> Tensor:
    """What attention over all keys at once would give, from attention over two parts of them.

    Args:
        first: as :func:`attend` returns it.
        second: of the other keys.
        sinks: ``[heads]`` scores of keys without a value (gpt-oss); they only take weight away.

    Returns:
        ``[batch, heads, new, value_dim]`` in the first part's dtype, computed in float32; zero
        where neither part has anything to see.
    """
    (average, total), (other, other_total) = first, second
    # Not a number only where neither part has anything to see.
    weight = torch.sigmoid(other_total - total).nan_to_num_(0.0)
    merged = torch.lerp(average.float(), other.float(), weight[..., None])
    if sinks is not None:
        seen = torch.logaddexp(total, other_total) - sinks.float()[:, None]
        merged = merged * torch.sigmoid(seen)[..., None]
    return merged.to(average.dtype)


@dataclass(frozen=True)
class Borrowed:
    """Keys and values of another context, to which a row attends in some layers, not to its own.

    The row's own tokens, written after the prefix, are attended to as ever. Keys keep the positions
    that they were computed at. What was prefilled, the logits of a first token included, is as it
    was: the tokens that follow borrow.

    Attributes:
        context: the number of the context that they are taken from, as rows are numbered.
        layers: in which the row attends to it (from 1: inside block l).
    """

    context: int
    layers: Sequence[int]


@dataclass(frozen=True)
class _GroupRows:
    """The rows of one group's contexts.

    Attributes:
        contexts: of the group, from the first to the last that has rows.
        rows: ``[contexts, most]`` int64, the rows of each context; filled up with row 0.
        bias: ``[contexts, 1, 1, tokens]`` in the model's dtype, minus infinity at left padding;
            None where there is none.
    """

    contexts: slice
    rows: Tensor
    bias: Tensor | None


class PrefixTable:
    """Which row goes on from which context, as all shared layers of a cache see it.

    Rows that join others (:meth:`join`) have written fewer tokens of their own.

    Args:
        masks: of each group ``[contexts, tokens]``, 0 for left padding.
        contexts: ``[rows]``, the number of each row's context, counted through all groups.
        borrowed: for each row, what it borrows, or None; empty where no row does.
        dtype: of the model.

    Attributes:
        ages: how many own tokens each row has.
        width: tokens of the longest row, its prefix included.
    """

    def __init__(
        self,
        masks: Sequence[Tensor],
        contexts: Sequence[int],
        borrowed: Sequence[Borrowed | None],
        dtype: torch.dtype,
    ) -> None:
        self._masks, self._dtype = list(masks), dtype
        self._contexts = list(contexts)
        self._borrowed = list(borrowed) or [None] * len(self._contexts)
        self.ages, self.width = [0] * len(self._contexts), max(mask.shape[1] for mask in masks)
        self._drop_tensors()

    def __len__(self) -> int:
        return len(self._contexts)

    def _drop_tensors(self) -> None:
        """Tensors are made anew when they are asked for."""
        self._group_rows: dict[torch.device, tuple[list[_GroupRows | None], Tensor]] = {}
        self._own_bias: dict[torch.device, Tensor | None] = {}
        self._own_places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def age(self) -> int:
        """How many own tokens the oldest row has."""
        return max(self.ages, default=0)

    def advance(self, new: int) -> None:
        """Every row has so many tokens more."""
        self.ages = [age + new for age in self.ages]
        self.width += new
        self._own_bias, self._own_places = {}, {}

    def join(self, other: "PrefixTable", width: int) -> None:
        """The rows of another table, which borrow nothing, behind its own; the longest of all is
        so long."""
        first = sum(map(len, self._masks))
        self._masks += other._masks
        self._contexts += [first + context for context in other._contexts]
        self._borrowed += [None] * len(other)
        self.ages, self.width = self.ages + other.ages, width
        self._drop_tensors()

    @property
    def borrowers(self) -> list[tuple[int, Borrowed]]:
        """The rows that borrow, and what."""
        return [(row, one) for row, one in enumerate(self._borrowed) if one is not None]

    def keep(self, index: Sequence[int]) -> None:
        """Only the given rows, in the given order."""
        self._contexts = [self._contexts[row] for row in index]
        self._borrowed = [self._borrowed[row] for row in index]
        self.ages = [self.ages[row] for row in index]
        self._drop_tensors()

    def group_rows(self, device: torch.device) -> tuple[list[_GroupRows | None], Tensor]:
        """Where the rows of each group are, on a layer's device.

        Returns:
            For each group its rows, or None if none is left. And ``[rows + borrowers]`` int64:
            where, in the groups' attention ``[contexts * most]`` one below the other, that of each
            row to its own prefix is, and behind them that of each borrower to the other one.
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
        """``[rows]`` int64, twice: each row, and where its next token goes."""
        if device not in self._own_places:
            ages = torch.tensor(self.ages, device=device)
            self._own_places[device] = torch.arange(len(ages), device=device), ages
        return self._own_places[device]

    def own_bias(self, new: int, device: torch.device) -> Tensor | None:
        """``[rows or 1, 1, new, age + new]``: minus infinity where one of the new tokens would see
        a later one, or what isn't its row's; None where each sees all."""
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


ATTRIBUTE = "shared_layer"  # of keys that a shared layer handed out: the layer

UNUSED = "its attention doesn't use the cached keys as they are"


@dataclass(frozen=True)
class Engine:
    """How a model's rows attend to their prefix.

    Attributes:
        shared: the layers, counted from 1, in which rows read it where the prefill left it; in the
            others each row has a copy, or a state of its own.
        layers: of the model.
        why: why no layer shares; empty otherwise.
        ignored: what the start-up check found, if it was to be ignored; empty otherwise.
    """

    shared: tuple[int, ...]
    layers: int
    why: str = ""
    ignored: str = ""

    @classmethod
    def possible(cls, model: PreTrainedModel) -> "Engine":
        """As many shared layers as the model's architecture allows."""
        layers = DynamicCache(config=model.config).layers
        full = [n for n, layer in enumerate(layers, start=1) if type(layer) is DynamicLayer]
        return cls(tuple(full), len(layers), "" if full else "no layer has full attention")

    @property
    def share(self) -> bool:
        """Whether any layer shares."""
        return bool(self.shared)

    @property
    def name(self) -> str:
        """What a run records."""
        if not self.shared:
            return "a copy of the prefix per row"
        if len(self.shared) == self.layers:
            return f"prefix shared in all {self.layers} layers"
        return f"prefix shared in layers {_ranges(self.shared)} of {self.layers}, copied in others"

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


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
    """A full-attention layer: the prefixes by reference, and what rows add to them.

    ``keys`` and ``values`` are views of the rows' own tokens only, ``[rows, kv_heads, own, dim]``;
    lengths and mask sizes count the longest prefix as well, padding included.

    Args:
        prefixes: the same layer of each group that was prefilled, left as it is.
        table: of the batch, the same for all layers of a cache.
        number: of the layer, from 1.
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
        self.table, self.number = table, number
        keys, values = self.prefixes[0]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._own = [
            tensor.new_zeros(places, tensor.shape[1], room, tensor.shape[-1])
            for tensor in (keys, values)
        ]
        self._waiting = False  # keys were handed out that no attention function has used yet
        self._set_views(0)

    def _set_views(self, tokens: int) -> None:
        self.keys, self.values = (own[: len(self.table), :, :tokens] for own in self._own)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, kv_heads, new, dim]``; returns the rows' own ones.

        Rows of several ages have one new token each.

        Raises:
            RuntimeError: the model's attention didn't use what was returned the last time.
        """
        self.check_used()
        start = self.table.age
        end = start + key_states.shape[2]
        for own, states in zip(self._own, (key_states, value_states), strict=True):
            if len(set(self.table.ages)) == 1:
                own[: len(states), :, start:end] = states
            else:
                row, at = self.table.own_places(own.device)
                own[row, :, at] = states[:, :, 0]
        self._set_views(end)
        self._waiting = True
        # A view that isn't kept, or the two would keep each other alive. It carries this layer,
        # since attention functions don't get the cache.
        keys = self.keys[:]
        setattr(keys, ATTRIBUTE, self)
        return keys, self.values

    def check_used(self) -> None:
        """Raises RuntimeError if keys were handed out that no attention function has used."""
        if self._waiting:
            raise RuntimeError(UNUSED)

    def get_seq_length(self) -> int:
        return self.table.width + max(0, self.keys.shape[2] - self.table.age)

    def join(self, other: "SharedLayer") -> None:
        """Take in rows, which have no token of their own yet; the table is told before."""
        self.prefixes += other.prefixes
        self._set_views(self.table.age)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in the given order, moving only those that change their place; the
        prefixes stay where they are. The table is told by who calls this, with an index on the
        host, so that no layer waits for a device."""
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
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of queries ``[rows, heads, new, dim]`` over prefix and own tokens, whose keys
        and values are ``[rows, kv_heads, own, …]``: ``[rows, heads, new, value_dim]``."""
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
    """Attention as ``transformers`` calls it, over a shared layer; ``[rows, new, heads, dim]``."""
    if sliding_window is not None:
        raise NotImplementedError("the layer's keys aren't kept for this sliding window")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = getattr(key, ATTRIBUTE).attend(query, key, value, scaling, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None
