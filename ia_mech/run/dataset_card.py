"""The dataset card of a run: a folder that is uploaded as it is can be browsed on the hub."""

from typing import Any


def dataset_card(record: dict[str, Any], contexts: int) -> str:
    """``README.md`` of a finished run, with the hub's configuration of its two tables.

    Args:
        record: ``run.json``.
        contexts: how many there are.
    """
    identity = record["identity"]
    settings, model = identity["settings"], identity["model"]
    adapter = f" with the adapter `{model['adapter']}`" if model.get("adapter") else ""
    if model.get("random_blocks") is not None:
        adapter += f" with random blocks (seed {model['random_blocks']})"
    temperatures = ", ".join(f"{t:g}" for t in settings["temperatures"])
    sampled = f"{settings['samples']} at each of T = {temperatures}" if temperatures else "no other"
    software = ", ".join(f"{name} {version}" for name, version in identity["software"].items())
    lines = [
        "---",
        *(_configs() if contexts else []),
        "tags:",
        "- user-turn-generation",
        "---",
        "",
        f"# User turns written by {model['name']}",
        "",
        "A chat model was given a query and a response, and wrote the next *user* turn under the "
        f"user header of its own chat template, in {contexts} contexts: one turn greedily, and "
        f"{sampled}, of at most {settings['max_new_tokens']} tokens.{_opening(settings)}",
        "",
        "**The user turns were written by a model, not by people.** The conversations before them "
        f"are from `{settings['dataset']}`{_responses(record)}. Their licence is not recorded "
        "here: state it before you share this folder.",
        "",
        "| folder | what |",
        "|---|---|",
        "| `contexts/` | a row per context: the conversation, its tokens, scores of the user's "
        "real next turn |",
        "| `generations/` | a row per user turn that the model wrote |",
        "| `residuals/` | the residual stream, a tensor `[context, position, d_model]` per layer; "
        "`layer_00` is the embeddings, `layer_NN` the output of block NN |",
        *(
            ["| `header_logits/` | the logits from which the first token of the turn is drawn |"]
            if settings["header_logits"] != "none"
            else []
        ),
        "",
        "## Provenance",
        "",
        f"- model: `{model['name']}`{adapter}, revision {model.get('revision') or 'not given'}, "
        f"weights `{model['weights_hash']}`, {model['dtype']}, {model['layers']} layers, d_model "
        f"{model['d_model']}",
        f"- chat template: `{identity['chat']['template_hash']}`",
        f"- positions kept: {', '.join(identity['positions'])}",
        f"- seed: {settings['seed']}",
        f"- software: {software}",
        "",
        "`run.json` has all settings, `manifests/` a hash of every file.",
    ]
    return "\n".join(lines) + "\n"


def _opening(settings: dict[str, Any]) -> str:
    """The words that turns were made to begin with, if any."""
    words = settings["opening"]
    return f" Every turn goes on from the words `{words}`, which its text lacks." if words else ""


def _responses(record: dict[str, Any]) -> str:
    """Whose responses the contexts hold, if not the data's."""
    if not record["parts"]["responses"]:
        return ""
    settings = record["identity"]["settings"]
    of, most = "all", settings["max_response_tokens"]
    if settings["response"] != "generate":
        of = "those that the data lacks"
    return (
        f", but **the model wrote their responses** ({of}, {settings['responses']} to a query, of "
        f"at most {most} tokens; `response_unfinished` marks those that reached it, or ended in "
        "their thought), and the user's real next turn answered another response"
    )


def _configs() -> list[str]:
    """The hub's configurations: which files make a table."""
    return [
        "configs:",
        "- config_name: generations",
        "  default: true",
        "  data_files: generations/*.parquet",
        "- config_name: contexts",
        "  data_files: contexts/*.parquet",
    ]
