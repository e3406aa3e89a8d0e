"""The dataset card of a run, ``README.md``: with it the hub shows an uploaded run's tables."""

from typing import Any

TABLES = """\
configs:
- config_name: generations
  default: true
  data_files: generations/*.parquet
- config_name: contexts
  data_files: contexts/*.parquet
"""


def dataset_card(record: dict[str, Any], contexts: int) -> str:
    """The text of the card, with the hub's configuration of the two tables.

    Args:
        record: ``run.json``.
        contexts: how many contexts the run has.
    """
    settings, model = record["identity"]["settings"], record["identity"]["model"]
    responses = record["parts"]["responses"] and (
        f"; **the model also wrote responses** (at most {settings['max_response_tokens']} tokens), "
        "and each real follow-up came after another response"
    )
    return f"""\
---
{TABLES if contexts else ""}tags:
- user-turn-generation
---

# User turns written by {model["name"]}

`{model["name"]}` was given a query and a response, and wrote the next *user* turn under the user
header of its chat template, in {contexts} contexts.

**The user turns were written by a model, not by people.** The conversations before them are from
`{settings["dataset"]}`{responses or ""}. Their licence is not recorded here: state it before you
share this folder.

`contexts/` and `generations/` have a row per context and per turn, `residuals/` a tensor
`[context, position, d_model]` per layer. `run.json` has all settings and the hash of the weights
(`{model["weights_hash"]}`), `manifests/` a hash of every file.
"""
