"""Tables that an interrupted command keeps and needn't compute again."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.run.integrity import replace_file


def kept(folder: Path, key: Any) -> pd.DataFrame | None:
    """A table that was kept; None if it isn't there, or is damaged.

    Args:
        folder: where tables are kept.
        key: all that the table depends on, as JSON can hold it; numbers may be NumPy's.
    """
    try:
        return pq.read_table(_file(folder, key), page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


def keep(folder: Path, key: Any, table: pd.DataFrame) -> None:
    """Keep a table; arguments as for :func:`kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(_file(folder, key), partial(table.to_parquet, write_page_checksum=True))


def _file(folder: Path, key: Any) -> Path:
    text = json.dumps(key, default=lambda value: value.tolist())
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.parquet"
