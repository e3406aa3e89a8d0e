"""Who a source is: its dataset and its id in one string, as two datasets may use the same id."""

import pandas as pd

SEPARATOR = "\x1f"  # ASCII's unit separator, which names don't hold


def source_key(dataset: str, source_id: str) -> str:
    """The source's name across runs and datasets."""
    return f"{dataset}{SEPARATOR}{source_id}"


def sources_of(frame: pd.DataFrame) -> pd.Series:
    """``[rows]`` sources of rows with ``dataset`` and ``source_id``."""
    return frame["dataset"].astype(str) + SEPARATOR + frame["source_id"].astype(str)


def split_source(source: str) -> tuple[str, str]:
    """Dataset and id."""
    dataset, _, source_id = source.partition(SEPARATOR)
    return dataset, source_id
