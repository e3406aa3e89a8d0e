"""What steering takes of turns and of tables that are kept."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.display import Bar
from ia_mech.run import integrity

TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)

Ids = tuple[int, ...]


def drawn(names: Sequence[str], most: int, seed: int) -> list[str]:
    """At most so many of the names, drawn by seed; in their order."""
    rng = np.random.default_rng([seed, len(names)])
    return [names[i] for i in sorted(rng.permutation(len(names))[:most])]


def computed_for_each(
    those: Sequence[Any],
    phase: str,
    folder: Path,
    key: Callable[[Any], Any],
    compute: Callable[[Any], pd.DataFrame],
) -> pd.DataFrame:
    """Tables of queries one below the other, with ``source`` and ``dataset``.

    Args:
        those: the queries; each has a ``source`` and a ``dataset``.
        phase: what the progress bar is called.
        folder: as of :func:`computed_once`.
        key: the same of one of them.
        compute: the same of one of them.
    """
    bar, parts = Bar(), []
    bar.start(phase, len(those), unit="source")
    try:
        for one in those:
            made = computed_once(folder, key(one), partial(compute, one))
            parts.append(made.assign(source=one.source, dataset=one.dataset))
            bar.advance()
    finally:
        bar.stop()
    return pd.concat(parts, ignore_index=True)


def computed_once(
    folder: Path,
    key: Any,
    compute: Callable[[], pd.DataFrame],
    on_kept: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """A table that an interrupted command needn't compute again.

    Args:
        folder: where tables are kept.
        key: all that the table depends on, as JSON can hold it.
        compute: makes it.
        on_kept: called if the table is there, and can be read.
    """
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()
    file = folder / f"{name}.parquet"
    try:
        kept = pq.read_table(file, page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):  # or it is damaged
        pass
    else:
        on_kept()
        return kept
    made = compute()
    folder.mkdir(parents=True, exist_ok=True)
    integrity.replace_file(file, partial(made.to_parquet, write_page_checksum=True))
    return made
