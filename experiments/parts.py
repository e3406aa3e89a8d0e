"""Tables that an interrupted command keeps and needn't compute again."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.errors import UserError
from ia_mech.run.integrity import replace_file


def computed_once(folder: Path, key: Any, compute: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A table, from its file if it was computed before.

    Args:
        folder: where tables are kept.
        key: all that the table depends on, as JSON can hold it; numbers may be NumPy's.
        compute: makes it.
    """
    file = _file(folder, key)
    try:
        return pq.read_table(file, page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        pass  # it isn't there, or it is damaged
    made = compute()
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(file, partial(made.to_parquet, write_page_checksum=True))
    return made


def is_kept(folder: Path, key: Any) -> bool:
    """Whether there is a file of this table."""
    return _file(folder, key).is_file()


def _file(folder: Path, key: Any) -> Path:
    text = json.dumps(key, default=_plain)
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.parquet"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    kind = type(value).__name__
    raise UserError(f"a unit holds a {kind}", "hold numbers, texts and lists, which JSON can keep")
