"""Decode rows of prefilled contexts: the entry point, and the contract of an engine back end.

A back end is a subclass of :class:`ia_mech.engine.loop.Stream` whose ``run()`` returns one
:class:`~ia_mech.engine.loop.Decoded` for each row, in order. To add one:

1. Choose it in :func:`decode_stream`, by an argument that :class:`Engine
   <ia_mech.engine.shared_prefix.Engine>` has a field for; ``Engine.name`` is what a run records.
2. Leave the groups' prefilled states as they are, take each group when its first row begins, and
   keep none longer than its rows need it.
3. Draw with :mod:`ia_mech.engine.sampling`, keyed by ``Row.stream`` and the token's index; what is
   drawn may depend on rows, width and stops, never on time.
4. Compare it with full forward passes before a run (:func:`ia_mech.engine.check.check_engine`), and
   fall back, with a reason in ``Engine.why``, where an architecture's numbers differ.
5. Show numbers contract 6 in a test: the same tokens as ``Stream``, but for near-ties.
"""

from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedModel

from ia_mech.engine.cuda.stepper import StaticBuffers
from ia_mech.engine.cuda.stream import StaticStream
from ia_mech.engine.loop import Decoded, Row, Stream
from ia_mech.engine.prefill import Prefilled


def decode(
    model: PreTrainedModel,
    prefilled: Prefilled,
    rows: Sequence[Row],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    on_step: Callable[[int, list[int]], None] | None = None,
    share: bool = True,
    static: StaticBuffers | None = None,
) -> list[Decoded]:
    """Decode rows of one group of contexts, all together; see :func:`decode_stream`."""
    return decode_stream(
        model,
        [prefilled],
        rows,
        stop_ids,
        max_new_tokens,
        width=len(rows),
        on_step=on_step,
        share=share,
        static=static,
    )


def decode_stream(
    model: PreTrainedModel,
    groups: Iterable[Prefilled],
    rows: Sequence[Row],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    *,
    width: int,
    on_step: Callable[[int, list[int]], None] | None = None,
    share: bool = True,
    static: StaticBuffers | None = None,
) -> list[Decoded]:
    """Decode rows to their turn-end or to ``max_new_tokens``, in a batch that is kept full.

    A row that finishes frees its batch slot for the next one, of whatever context; a group of
    contexts is taken when its first row begins, and released when its last one has. Where a cache
    can't be joined (see :func:`ia_mech.engine.prefill.can_join`), a batch is decoded to its end
    before the next one begins.

    Args:
        model: the subject model.
        groups: contexts in order, prefilled together; left as they are.
        rows: what to decode, in any order; their contexts are counted through all groups.
        stop_ids: ids that end a row (kept as its last token).
        max_new_tokens: most tokens of a row.
        width: most rows in the batch.
        on_step: called whenever tokens were drawn: how many, and how many each row has in all that
            finished with one of them.
        share: rows read their context's keys and values where the prefill left them, in layers of
            full attention; else every row gets a copy. In ``static`` buffers they always do.
        static: decode in these buffers, which serve streams of the same ``width`` one after the
            other; where :attr:`~ia_mech.engine.shared_prefix.Engine.static` is true.

    Returns:
        What each row wrote, in the order of ``rows``.

    Raises:
        ValueError: rows or contexts don't fit into ``static``, or rows are steered there: its steps
            may be captured, and run no hooks.
    """
    if not rows:
        return []
    if static is not None and any(row.steered for row in rows):
        raise ValueError("steered rows can't be decoded in static buffers")
    order = sorted(range(len(rows)), key=lambda i: rows[i].context)
    sorted_rows = [rows[i] for i in order]
    arguments = model, groups, sorted_rows, stop_ids, max_new_tokens, width, on_step, share
    stream = (
        Stream(*arguments)
        if static is None
        else StaticStream(static, static.sizes(width), *arguments)
    )
    decoded = dict(zip(order, stream.run(), strict=True))
    return [decoded[i] for i in range(len(rows))]
