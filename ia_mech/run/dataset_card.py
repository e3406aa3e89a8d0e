"""The dataset card of a run, ``README.md``: with it the hub shows an uploaded run's tables."""

from typing import Any

import pandas as pd

TABLES = """\
configs:
- config_name: generations
  default: true
  data_files: generations/*.parquet
- config_name: contexts
  data_files: contexts/*.parquet
"""


def dataset_card(record: dict[str, Any], contexts: pd.DataFrame) -> str:
    """The text of the card, with the hub's configuration of the two tables.

    Args:
        record: ``run.json``.
        contexts: of the run, with the columns ``response_policy`` and ``real_follow_up``.
    """
    settings, model = record["identity"]["settings"], record["identity"]["model"]
    generated = contexts["response_policy"] == "generated"
    replaced, of = generated & contexts["real_follow_up"].notna(), len(contexts)
    said = ""
    if generated.any():
        said = f"; **the model also wrote {generated.sum()} of the {of} responses** (at most "
        said += f"{settings['max_response_tokens']} tokens)"
    if replaced.any():
        said += f"; {replaced.sum()} of the {contexts['real_follow_up'].count()} real follow-ups "
        said += "came after another response than the model's, which is here"
    return f"""\
---
{TABLES}tags:
- user-turn-generation
---

# User turns written by {model["name"]}

`{model["name"]}` was given a query and a response, and wrote the next *user* turn under the user
header of its chat template, in {len(contexts)} contexts.

**The user turns were written by a model, not by people.** The conversations before them are from
`{settings["dataset"]}`{said}. Their licence is not recorded here: state it before you
share this folder.

`contexts/` and `generations/` have a row per context and per turn, `residuals/` a tensor
`[context, position, d_model]` per layer. `run.json` has all settings and the hash of the weights
(`{model["weights_hash"]}`), `manifests/` a hash of every file.
"""
