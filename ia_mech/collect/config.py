"""The configuration of a run: one frozen dataclass, written verbatim to ``run.json``."""

from dataclasses import dataclass, field

from ia_mech.chat.template import PINNED_DATE
from ia_mech.data.formats import ColumnMap
from ia_mech.engine.plan import Grid
from ia_mech.models.load import ModelSpec


@dataclass(frozen=True)
class SampleConfig:
    """Everything that decides what a run contains; written to it verbatim.

    Attributes:
        response: ``given`` uses the data's assistant response, ``generate`` has the subject model
            write it greedily, ``auto`` generates only where the data has none.
        positions: names of positions to keep, or ``all``, or ``header`` (the header's tokens).
        header_logits: ``full``, ``none``, or the number of largest logits to keep.
        batch_rows: most rows decoded together, None for what suits the device; part of a run's
            identity because rounding depends on the batch.
        swaps: other conversations' responses that reference turns are scored after.
        score_generations: whether generations are scored after other responses too.
        candidates: a JSONL file of turns that references are compared with, besides the usual.
        engine: ``shared`` has rows attend to their context's keys and values where the prefill left
            them, ``portable`` gives each row a copy, ``auto`` shares in every layer that allows it.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    dataset: str = "builtin"
    subset: str | None = None
    split: str | None = None
    limit: int | None = 24
    columns: ColumnMap = field(default_factory=ColumnMap)
    response: str = "auto"
    max_response_tokens: int = 512
    grid: Grid = field(default_factory=Grid)
    system: str | None = None
    thinking: str = "template"
    date: str = PINNED_DATE
    positions: tuple[str, ...] = ("all",)
    header_logits: str = "full"
    batch_rows: int | None = None
    swaps: int = 4
    score_generations: bool = False
    candidates: str | None = None
    engine: str = "auto"
