"""The state that decoding and scoring go on from: contexts, prefilled once and expanded to rows.

The state of a prefill is never changed: rows go on from copies of it, or refer to it where a layer
shares its prefix (``shared.py``). Rows of a batch may continue contexts of several groups. Sliding
windows end with the newest token of every row, so the contexts of shorter groups are padded on
their left.
"""

import copy
import inspect
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ia_mech.engine.installed import installed
from ia_mech.engine.intervene import Intervention
from ia_mech.engine.memory import allowed
from ia_mech.engine.passes import Pass, making
from ia_mech.engine.shared import Borrowed, PrefixTable, SharedLayer, check_borrowed, held
from ia_mech.errors import UserError

CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
RECURRENT = ("conv_states", "recurrent_states")

# Most tokens of one prefill, padding included. A CPU is fastest while a prefill's activations fit
# into its caches: four contexts of 230 tokens take a fourth less time per context than sixteen. A
# GPU is fast when it has much to do; its number is an estimate.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
PADDING = 0.25  # most padding of sequences that are computed together, as a share of their tokens


@dataclass(frozen=True)
class Prefix:
    """One context as the engine sees it.

    ``positions`` are the named tokens' indices into ``ids``, in the run's order; -1 = lacking.
    ``interventions`` change the prefill, at indices into ``ids``. ``start`` is the position id of
    the first token.
    """

    ids: Sequence[int]
    positions: Sequence[int] = ()
    interventions: Sequence[Intervention] = ()
    start: int = 0


@dataclass
class State:
    """Keys, values and recurrent state of rows, and what each row attends to.

    ``cache`` is a ``transformers`` cache of ``rows`` rows; ``mask`` is ``[rows, length]`` int64, 1
    for real tokens and 0 for left padding; ``position`` is ``[rows]`` int64, the position id of the
    next token. ``table`` is None where no layer is shared. ``padded`` says whether the mask hides
    anything; it is looked up once, since each look waits for the device.
    """

    cache: DynamicCache
    mask: Tensor
    position: Tensor
    table: PrefixTable | None = None

    def __post_init__(self) -> None:
        self.padded = self.mask.numel() > 0 and not bool(self.mask.all())

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    @torch.inference_mode()
    def drop(self, finished: Collection[int]) -> list[int]:
        """Drop finished rows in place; the last rows take their places, so that few have to move.

        Returns:
            The rows that are kept, in their new order.
        """
        gone = {*finished}
        last = [row for row in range(self.rows) if row not in gone]
        index = [last.pop() if row in gone else row for row in range(len(last))]
        at = torch.tensor(index)
        if self.table is not None:
            self.table.keep(index)
        self.cache.reorder_cache(cast(torch.LongTensor, at))  # layer by layer
        self.mask, self.position = self.mask[at], self.position[at]
        return index

    @torch.inference_mode()
    def join(self, other: "State") -> None:
        """Append the rows of another state, which were fed nothing yet."""
        both = self, other
        length = max(int(state.mask.sum(1).max()) for state in both)
        everyone = [torch.arange(state.rows) for state in both]
        if self.table is not None and other.table is not None:
            self.table.join(other.table, length)
        for at, (mine, theirs) in enumerate(
            zip(self.cache.layers, other.cache.layers, strict=True)
        ):
            if isinstance(mine, SharedLayer):
                mine.join()
            else:
                self.cache.layers[at] = rows_of([mine, theirs], everyone, length)
        self.mask = torch.cat([_of_width(state.mask, length) for state in both])
        self.position = torch.cat([self.position, other.position])
        self.padded = not bool(self.mask.all())


def _of_width(mask: Tensor, width: int) -> Tensor:
    """A mask with so many columns: padding added on its left, or taken away."""
    return pad(mask, (width - mask.shape[1], 0))


@dataclass
class Prefilled:
    """A group of contexts after their single forward pass.

    ``logits``: ``[contexts, vocab]`` float32 at the last token. ``residuals``: ``[contexts,
    layers + 1, positions, d_model]`` in the model's dtype, or None if nothing was to be captured.
    """

    state: State
    logits: Tensor
    residuals: Tensor | None


# -- prefill --------------------------------------------------------------------------------------


def prefill(
    model: PreTrainedModel, prefixes: Sequence[Prefix], *, whole: bool = False
) -> Prefilled:
    """Run a left-padded group of contexts through the model once.

    Args:
        model: the subject model, in evaluation mode and installed.
        prefixes: the contexts; all with the same number of positions, at which the residual stream
            is captured as the interventions leave it.
        whole: layers with a sliding window also keep the tokens that it has passed.
    """
    ids, mask = _left_padded([prefix.ids for prefix in prefixes])
    cache = DynamicCache(config=model.config)
    for layer in cache.layers if whole else ():
        if type(layer) is DynamicSlidingWindowLayer:
            layer.activate_past_recording()
    state = State(
        cache=cache,
        mask=mask[:, :0].to(model.device),
        position=torch.tensor([prefix.start for prefix in prefixes]).to(
            model.device, non_blocking=True
        ),
    )
    logits, residuals = forward(
        model,
        state,
        ids,
        mask,
        first=[len(prefix.ids) - ids.shape[1] for prefix in prefixes],
        captured=[prefix.positions for prefix in prefixes] if prefixes[0].positions else None,
        interventions=[prefix.interventions for prefix in prefixes],
    )
    return Prefilled(state, logits[:, -1], residuals)


def prefill_all(
    model: PreTrainedModel,
    prefixes: Sequence[Prefix],
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[list[Prefilled], list[int]]:
    """Prefill contexts in groups of similar length.

    Args:
        on_tokens: called after each group with how many tokens were prefilled.

    Returns:
        The groups, and for each of their contexts, in order, its index in ``prefixes``.
    """
    lengths = [len(prefix.ids) for prefix in prefixes]
    groups, order = [], []
    for members in similar_lengths(lengths, allowed(PREFILL_TOKENS[model.device.type])):
        groups.append(prefill(model, [prefixes[i] for i in members]))
        order += members
        if on_tokens is not None:
            on_tokens(sum(lengths[i] for i in members))
    return groups, order


def similar_lengths(
    lengths: Sequence[int], most_tokens: int, most: int | None = None
) -> Iterator[list[int]]:
    """Split sequences into groups of similar length, shortest first.

    Args:
        lengths: tokens of each.
        most_tokens: most tokens of a group, padding included; a longer sequence is alone.
        most: most sequences of a group; None for any number.

    Yields:
        Indices into ``lengths``; every index once.
    """
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Sorted, so the one that comes last is the longest of its group.
        padded = (len(group) + 1) * lengths[i]
        real = lengths[i] + sum(lengths[j] for j in group)
        full = len(group) == most or padded > most_tokens
        if group and (full or padded - real > PADDING * real):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _left_padded(ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """``[rows, longest]`` int64 ids with zeros on their left, and the mask of the real ones, on the
    host."""
    each = [torch.tensor(one) for one in ids]
    both = each, [torch.ones_like(one) for one in each]
    padded, mask = (pad_sequence(x, batch_first=True, padding_side="left") for x in both)
    return padded, mask


class Output(NamedTuple):
    """What a pass gives: raw ``logits`` ``[rows, kept, vocab]`` in float32, and ``residuals``
    ``[rows, layers + 1, positions, d_model]`` in the model's dtype, None if nothing was captured.
    """

    logits: Tensor
    residuals: Tensor | None


def forward(
    model: PreTrainedModel,
    state: State,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    keep: int = 1,
    first: Sequence[int] = (),
    captured: Sequence[Sequence[int]] | None = None,
    interventions: Sequence[Sequence[Intervention]] = (),
    gradients: bool = False,
) -> Output:
    """Feed tokens to the rows of a state, which is advanced in place.

    This is the only place that makes a pass (``passes.py``).

    Args:
        state: its cache, mask and positions grow by ``ids``.
        ids: ``[rows, new]`` int64.
        mask: ``[rows, new]`` int64, 0 for padding (left padding of a fresh state, or right padding
            of the last tokens this state will ever see); None where there is none.
        keep: how many of the new tokens' logits to return, from the end; 0 = all.
        first, captured, interventions: as for :class:`ia_mech.engine.passes.Pass`; ``first`` is 0
            for all rows unless it is given.
        gradients: let them flow through the pass to the tensors that interventions hold. Rows then
            need copies (see :func:`expand`).

    Raises:
        UserError: the pass doesn't compute a token, or the model lacks a layer, that is to be
            captured or changed; or a row is so long that the model would rotate all its tokens
            differently.
        RuntimeError: the model doesn't use its attention or its blocks as the engine needs; its
            numbers are then wrong.
    """
    shared = [layer for layer in state.cache.layers if isinstance(layer, SharedLayer)]
    others = any(
        isinstance(layer, CacheLayerMixin) and not isinstance(layer, SharedLayer)
        for layer in state.cache.layers
    )
    made = installed(model)
    one = Pass(
        made.depth,
        ids.shape[1],
        first or [0] * len(ids),
        captured,
        interventions,
        masked=others or not shared,
    )
    device = state.mask.device  # the first layer's; sampled tokens are on the last layer's
    ids = ids.to(device, non_blocking=True)
    if mask is None:
        mask = torch.ones_like(ids)
    else:  # from the host, so that a pass doesn't wait for the one before
        state.padded = state.padded or not bool(mask.all())
        mask = mask.to(device, non_blocking=True)
    positions = state.position[:, None] + mask.cumsum(-1) - 1
    state.mask = torch.cat([state.mask, mask], dim=-1)
    if made.border is not None and int(positions.max()) >= made.border:
        raise UserError(
            f"a row has {int(positions.max()) + 1} tokens; beyond {made.border}, this model rotates"
            " all tokens differently",
            "leave such conversations out, or write fewer tokens",
        )
    arguments: dict[str, Any] = {}
    accepted = inspect.signature(model.forward).parameters
    if "logits_to_keep" in accepted:
        # Told a number, Gemma 4 computes its last layers for those tokens alone; for indices, a
        # device is waited for.
        few = 0 < keep < ids.shape[1]
        arguments["logits_to_keep"] = slice(-keep, None) if few else 0
    if "position_ids" in accepted:
        arguments["position_ids"] = positions.clamp(min=0)
    with torch.inference_mode(not gradients), making(one):
        output = model(
            input_ids=ids,
            # A mask of ones only costs time: without one, attention takes its unmasked path.
            attention_mask=state.mask if state.padded else None,
            past_key_values=state.cache,
            use_cache=True,
            **arguments,
        )
        logits = output.logits if keep == 0 else output.logits[:, -keep:]
        logits = logits.float()
    for layer in shared:
        layer.check_used()
    if state.table is not None:
        state.table.advance(ids.shape[1])
    state.position = state.position + mask.sum(-1)
    return Output(logits, one.residuals())


# -- expand ---------------------------------------------------------------------------------------


def expand(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    contexts: Sequence[int],
    room: int = 0,
    *,
    borrowed: Sequence[Borrowed | None] = (),
    copies: bool = False,
    places: int = 0,
) -> State:
    """A state whose row i goes on from context ``contexts[i]``; the groups are left as they were.

    The layers that the model's engine shares refer to the groups' keys and values, those with a
    sliding window where it holds the longest of all contexts and ``room``. In the others, each row
    has a copy.

    Args:
        groups: prefilled contexts, counted through all groups.
        contexts: ``[rows]``; those of a group come before those of the next.
        room: most tokens that will be fed to a row. Rows that are to join each other have the same,
            and the same groups.
        borrowed: what each row borrows, from any context of the groups; empty if no row does.
        copies: give each row a copy in every layer. Rows that are to become contexts need it, and
            so do gradients, which attention in parts doesn't have.
        places: most rows that there will be, if others are to join these.

    Raises:
        UserError: a row borrows in a layer that isn't shared.
    """
    engine, tokens = installed(model).engine, max(group.state.mask.shape[1] for group in groups)
    firsts = [0, *accumulate(len(group.logits) for group in groups)]
    of_group: dict[int, list[int]] = {}  # the contexts of its rows, counted in it
    for context in contexts:
        group = bisect(firsts, context) - 1
        of_group.setdefault(group, []).append(context - firsts[group])
    assert list(of_group) == sorted(of_group)
    index = [torch.tensor(own) for own in of_group.values()]
    states = [groups[group].state for group in of_group]
    length = max(state.mask.shape[1] for state in states)
    rows = [(s.mask[at], s.position[at]) for s, at in zip(states, index, strict=True)]
    mask = torch.cat([_of_width(masks, length) for masks, _ in rows])
    position = torch.cat([positions for _, positions in rows])
    table = None
    cache = copy.copy(states[0].cache)
    cache.layers = []
    every = zip(*(group.state.cache.layers for group in groups), strict=True)
    for number, layers in enumerate(every, start=1):
        if not copies and engine.shares(layers[0], number, tokens, room):
            if table is None:
                masks = [group.state.mask for group in groups]
                dtype = held(layers[0])[0].dtype
                table = PrefixTable(masks, contexts, borrowed, dtype, length)
            most = max(places, len(contexts))
            cache.layers.append(SharedLayer(layers, table, number, room, most))
        else:
            mine = [layers[group] for group in of_group]
            cache.layers.append(rows_of(mine, index, length, whole=copies))
    check_borrowed(borrowed, cache.layers)
    return State(cache, mask, position, table)


def held_tensors(layer: Any) -> list[Tensor]:
    """The rows' tensors in a cache layer of ``transformers``: keys and values, or other states."""
    values = [one for v in vars(layer).values() for one in (v.values() if type(v) is dict else [v])]
    return [value for value in values if isinstance(value, Tensor) and value.dim()]  # no constants


def copied_bytes(model: PreTrainedModel, groups: Sequence[Prefilled], room: int) -> int:
    """Most bytes of state that :func:`expand` copies to a row."""
    engine, tokens = installed(model).engine, max(group.state.mask.shape[1] for group in groups)
    return max(
        sum(
            tensor.nbytes
            for number, layer in enumerate(group.state.cache.layers, start=1)
            if not engine.shares(layer, number, tokens, room)
            for tensor in held_tensors(layer)
        )
        // group.state.rows
        for group in groups
    )


def rows_of(
    layers: Sequence[Any], index: Sequence[Tensor], length: int, *, whole: bool = False
) -> CacheLayer:
    """One layer made of the given rows of several layers, which are left as they were.

    ``reorder_cache`` is the one selection that every cache layer of ``transformers`` implements,
    recurrent ones included. It assigns new tensors, so shallow copies of the layers (and of the
    dictionaries that recurrent layers keep their states in) are enough to protect the originals.

    Args:
        layers: the same layer of each group.
        index: for each, the rows to take, ``[rows]`` int64.
        length: tokens of the longest group.
        whole: layers that keep more than their sliding window go on doing so.
    """
    twins = []
    for layer, rows in zip(layers, index, strict=True):
        twin = copy.copy(layer)
        for name, value in vars(twin).items():
            if isinstance(value, dict):
                setattr(twin, name, dict(value))
        twin.reorder_cache(cast(torch.LongTensor, rows))
        if isinstance(twin, DynamicSlidingWindowLayer) and twin.record_past and not whole:
            twin.crop(0)  # drops what the window has passed
            twin.record_past = False
        twins.append(twin)
    first, *others = twins
    if others and isinstance(first, DynamicLayer):
        tokens = min(length, max(twin.keys.shape[-2] for twin in twins))
        for name in ("keys", "values"):
            each = [getattr(twin, name) for twin in twins]
            padded = [pad(tensor, (0, 0, tokens - tensor.shape[-2], 0)) for tensor in each]
            setattr(first, name, torch.cat(padded))
        if hasattr(first, "cumulative_length"):  # how many tokens a window has seen
            first.cumulative_length = length
    if others and isinstance(first, LinearAttentionCacheLayerMixin):
        for name in RECURRENT:
            for number, state in getattr(first, name).items():
                if state is not None:
                    states = [getattr(twin, name)[number] for twin in twins]
                    getattr(first, name)[number] = torch.cat(states)
    return first
