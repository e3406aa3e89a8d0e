"""A source's key: its dataset and its id in one string, since two datasets may use the same id."""

import pandas as pd

SEPARATOR = "\x1f"  # ASCII's unit separator, which no name contains


def source_key(dataset: str, source_id: str) -> str:
    """The key of a source, which no other dataset's source shares."""
    return f"{dataset}{SEPARATOR}{source_id}"


def sources_of(frame: pd.DataFrame) -> pd.Series:
    """``[rows]`` keys of rows with the columns ``dataset`` and ``source_id``."""
    return frame["dataset"].astype(str) + SEPARATOR + frame["source_id"].astype(str)


def split_source(source: str) -> tuple[str, str]:
    """The dataset and the id of a key."""
    dataset, _, source_id = source.partition(SEPARATOR)
    return dataset, source_id
