"""The configuration of a run: one frozen dataclass, written verbatim to ``run.json``."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ia_mech.chat.template import PINNED_DATE
from ia_mech.data.formats import ColumnMap
from ia_mech.engine.plan import Grid, check_temperature
from ia_mech.errors import UserError
from ia_mech.models.embedded import cache_dir
from ia_mech.models.load import ModelSpec


@dataclass(frozen=True)
class SampleConfig:
    """Everything that decides what a run contains.

    Attributes:
        response: ``given`` uses the data's assistant response, ``generate`` has the subject model
            write it, ``auto`` generates only where the data has none.
        responses: how many the model writes to each query, a context each.
        response_temperature: at which it writes them; 0 = greedily.
        positions: names of positions to keep, or ``all``, or ``header`` (the header's tokens).
        header_logits: ``full``, ``none``, or the number of largest logits to keep.
        batch_rows: most rows decoded together, None for what suits the device; part of a run's
            identity because rounding depends on the batch.
        contrasts: whether reference turns are also scored after other responses, and in their own
            context against rivals.
        swaps: with ``contrasts``, after how many other conversations' responses.
        score_generations: with ``contrasts``, whether generations are scored there, too.
        candidates: a JSONL file of the user's own rivals of references.
        engine: ``shared`` has rows attend to their context's keys and values where the prefill left
            them, ``portable`` gives each row a copy, ``auto`` shares in every layer that allows it.
            ``graphs`` is ``auto`` with CUDA graphs on a GPU.
        intervention: a file with a steering vector, under which contexts are prefilled, turns
            sampled and references scored; responses are written without it.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    dataset: str = "builtin"
    subset: str | None = None
    split: str | None = None
    limit: int | None = 24
    columns: ColumnMap = field(default_factory=ColumnMap)
    response: str = "auto"
    responses: int = 1
    response_temperature: float = 0.0
    max_response_tokens: int = 512
    grid: Grid = field(default_factory=Grid)
    system: str | None = None
    thinking: str = "template"
    date: str = PINNED_DATE
    positions: tuple[str, ...] = ("all",)
    header_logits: str = "full"
    batch_rows: int | None = None
    contrasts: bool = False
    swaps: int = 4
    score_generations: bool = False
    candidates: str | None = None
    engine: str = "auto"
    intervention: str | None = None

    def __post_init__(self) -> None:
        if self.responses < 1:
            raise UserError(f"--responses {self.responses}", "give at least 1")
        if self.writes_responses and self.response == "given":
            raise UserError(
                "--response given: the model writes no responses",
                "leave out --responses and --response-temperature, or use --response generate",
            )
        if self.responses > 1 and self.response_temperature == 0:
            raise UserError(
                f"greedy decoding writes the same response {self.responses} times",
                "give a --response-temperature above 0",
            )
        check_temperature(self.response_temperature, "response temperature")
        if self.intervention is not None and self.contrasts:
            raise UserError(
                "--contrasts scores turns in contexts that --intervention doesn't reach",
                "leave one of them out",
            )
        if self.intervention is not None and self.engine == "graphs":
            raise UserError(
                "--engine graphs: a captured graph can't be changed by --intervention",
                "use --engine auto",
            )

    @property
    def writes_responses(self) -> bool:
        """Whether flags say how the model is to write responses."""
        return self.responses > 1 or self.response_temperature != 0

    @property
    def rivals(self) -> bool:
        """Whether references are compared with rivals."""
        return self.contrasts or self.candidates is not None

    def folder(self) -> Path:
        """``cache/<model>-<dataset>-<hash>``: the same configuration, the same folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        model = Path(os.path.abspath(self.model.name)).name  # a name for "." too
        names = [model, Path(self.dataset).stem, digest]
        words = ["".join(c if c.isalnum() or c in ".-" else "-" for c in name) for name in names]
        return cache_dir() / "-".join(words).lower()


def flag_of(path: str) -> str:
    """What a user calls a part of a run's identity: a flag for ``config.grid.samples``."""
    if not path.startswith("config."):
        return path.removesuffix(".sha256")
    *above, name = path.split(".")
    if above[-1] == "model" and name == "name":
        name = "model"
    elif above[-1] == "columns" and name not in ("format", "cut"):
        name += "_column"
    return "--" + name.replace("_", "-")
