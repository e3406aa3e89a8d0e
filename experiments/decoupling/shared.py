"""The same prompts for every model: who is who, and what they have in common."""

import pandas as pd

from ia_mech.errors import UserError


def labelled(contexts: pd.DataFrame) -> pd.DataFrame:
    """The contexts with ``model``: the name, with a hash where two sets of weights share it."""
    weights = contexts.groupby("name")["weights_hash"].transform("nunique")
    hashed = contexts["name"] + " " + contexts["weights_hash"].str[:8]
    return contexts.assign(model=contexts["name"].where(weights == 1, hashed))


def on_shared_prompts(contexts: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Only the prompts, per dataset, that all models have which have that dataset.

    Args:
        contexts: ``model``, ``dataset``, ``source``, ``source_id``, ``asked`` and ``answer``.
        notes: gets a line per dataset that lost prompts.

    Raises:
        UserError: a prompt has several texts or gold answers, or models have none in common.
    """
    _check_texts(contexts)
    kept = []
    for dataset, rows in contexts.groupby("dataset", sort=False):
        models, prompts = rows["model"].nunique(), rows["source"].nunique()
        had_by = rows.groupby("source")["model"].nunique()
        shared = rows[rows["source"].map(had_by) == models]
        if shared.empty:
            raise UserError(
                f"the models have no prompt of {dataset} in common",
                "sample them all from the same rows (--dataset, --limit)",
            )
        common = shared["source"].nunique()
        if common < prompts:
            notes.append(f"{dataset}: the {common} of {prompts} prompts that all models share.")
        kept.append(shared)
    alone = all(rows["model"].nunique() == 1 for rows in kept)
    if alone and contexts["model"].nunique() > 1:
        held = contexts.groupby("model")["dataset"].unique()
        told = ", ".join(f"{model}: {' and '.join(names)}" for model, names in held.items())
        raise UserError(
            f"the models have no dataset in common ({told})",
            "sample them all from the same file or preset",
        )
    return pd.concat(kept, ignore_index=True)


def _check_texts(contexts: pd.DataFrame) -> None:
    for column, what in (("asked", "text"), ("answer", "gold answer")):
        texts = contexts.groupby("source")[column].nunique(dropna=False)
        if (texts > 1).any():
            rows = contexts[contexts["source"] == texts.idxmax()]
            first = rows.iloc[0]
            other = rows[rows[column] != first[column]].iloc[0]
            raise UserError(
                f"prompt {first['source_id']!r} of {first['dataset']} has another {what} in "
                f"{other['run']} than in {first['run']}",
                "sample all runs from the same file",
            )
