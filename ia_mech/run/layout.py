"""Names and schemas of the files of a run.

::

    run.json                              what was asked and of which model; written once
    manifests/contexts-00000.json         of each part that is whole: its files and who made them
    README.md                             the dataset card, once the run is complete
    responses/part-00000.parquet          responses the subject model wrote, if any
    contexts/part-00000.parquet           one row per context
    generations/part-00000.parquet        one row per generation
    header_logits/00000.safetensors
    residuals/00000.safetensors           one tensor per layer
    states/0a1b2c3d-00000.safetensors     what ia-mech capture adds, per component and layer
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from ia_mech.cli import RUN
from ia_mech.errors import UserError

FORMAT = 7
CARD, MANIFESTS = "README.md", "manifests"
PART_KINDS = ("responses", "contexts")
STATES = "states"  # the kind of a part that ia-mech capture adds, and its folder
TENSORS = ("residuals", "header_logits", STATES)  # folders whose files a run can be read without
LOGITS = "shifted"  # the name of the tensor of header logits
METADATA = "names"  # the key, in the metadata of tensors, of JSON with ``contexts``, ``positions``

# The keys of a message. A key that a message lacks is stored as null, and left out on reading.
MESSAGE_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")
AS_JSON = ("tool_calls", "tools")
_MESSAGES = pa.list_(pa.struct([(name, pa.string()) for name in (*MESSAGE_TEXTS, *AS_JSON)]))

RESPONSES = pa.schema(
    [
        ("query", pa.int64()),  # order of the query's first context
        ("draw", pa.int32()),
        ("order", pa.int64()),  # of the context that the response became; null if it became none
        ("response", pa.string()),
        ("thought", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int32()),
    ]
)

# The first columns of contexts and of generations.
_KEYS = [
    ("context_id", pa.string()),
    ("source_id", pa.string()),
    ("dataset", pa.string()),
    ("perturbation", pa.string()),
    ("order", pa.int64()),
    ("response_index", pa.int32()),
]
GENERATIONS = pa.schema(
    [
        *_KEYS,
        ("response_unfinished", pa.bool_()),
        ("temperature", pa.float64()),
        # How many of the turn's first tokens are sampled at its temperature; the rest is greedy. It
        # is 0 for a greedy turn, and ``max_new_tokens`` for one that is sampled as a whole.
        ("sampled_tokens", pa.int32()),
        ("sample", pa.int32()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int32()),
        ("logprob_raw", pa.float64()),
        ("logprob_tempered", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs_raw", pa.list_(pa.float32())),
        ("ranks", pa.list_(pa.int32())),
        ("margins", pa.list_(pa.float32())),
    ]
)


DECODING = ("temperature", "sampled_tokens", "sample")  # tells the turns of a context apart
# The columns of ``Run.turns``, which identify a turn. NAMES are texts that many turns share.
NAMES = ("context_id", "source_id", "dataset", "perturbation")
PLACE = ("order", "response_index", "response_unfinished", *DECODING)
UNFINISHED = ("length", "thought")  # the ``response_finish_reason`` of unfinished responses
UNPERTURBED = "none"  # the perturbation of a conversation as it is
# Generations are sorted by these columns.
TURN_KEYS = ("order", *DECODING)


def message_columns(message: dict[str, Any]) -> dict[str, Any]:
    """A message as ``messages`` stores it."""
    written = {
        name: json.dumps(message[name], ensure_ascii=False) for name in AS_JSON if name in message
    }
    return {name: message.get(name) for name in MESSAGE_TEXTS} | written


def message_of(columns: dict[str, Any]) -> dict[str, Any]:
    """A message as it was before it was stored."""
    found = {name: value for name, value in columns.items() if value is not None}
    return found | {name: json.loads(found[name]) for name in AS_JSON if name in found}


def contexts_schema(position_names: Iterable[str]) -> pa.Schema:
    """Columns of ``contexts/``; ``positions`` has one field per named position of the template."""
    return pa.schema(
        [
            *_KEYS,
            ("messages", _MESSAGES),
            ("real_follow_up", pa.string()),
            ("answer", pa.string()),
            ("metadata", pa.string()),
            ("response_policy", pa.string()),
            ("response_thought", pa.string()),
            ("response_finish_reason", pa.string()),
            ("response_unfinished", pa.bool_()),
            ("text", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("context_tokens", pa.int32()),
            ("response_tokens", pa.int32()),
            ("positions", pa.struct([(name, pa.int32()) for name in position_names])),
            ("first_token_entropy", pa.float64()),
            ("first_token_entropy_tempered", pa.list_(pa.float64())),
            ("real_follow_up_token_ids", pa.list_(pa.int32())),
            ("real_follow_up_logprobs_raw", pa.list_(pa.float32())),
            ("real_follow_up_ranks", pa.list_(pa.int32())),
            ("real_follow_up_logprob", pa.float64()),
            ("real_follow_up_logprob_with_end", pa.float64()),
            ("real_follow_up_logprob_tempered", pa.list_(pa.float64())),
            ("real_follow_up_logprob_tempered_with_end", pa.list_(pa.float64())),
            ("real_follow_up_bits_per_byte", pa.float64()),
            ("real_follow_up_greedy", pa.bool_()),
            ("real_follow_up_greedy_tokens", pa.int32()),
            ("real_follow_up_greedy_left_rank", pa.int32()),
            ("real_follow_up_greedy_left_prob", pa.float64()),
        ]
    )


def manifest_file(kind: str, part: str) -> str:
    return f"{MANIFESTS}/{kind}-{part}.json"


def lock_file(kind: str, part: str) -> str:
    """The file that a process locks while it computes the part."""
    return f"{MANIFESTS}/{kind}-{part}.lock"


def batches_file(part: str) -> str:
    """What is kept of a part of responses until it is whole."""
    return f"responses/part-{part}.batches.json"


def part_names(count: int) -> list[str]:
    """The names of ``count`` planned parts, in their order."""
    return [f"{number:05d}" for number in range(count)]


def part_file(folder: str, part: str) -> str:
    """The file with a part's rows or tensors, in one of the folders above."""
    if folder in TENSORS:
        return f"{folder}/{part}.safetensors"
    return f"{folder}/part-{part}.parquet"


def texts_of(files: dict[str, Any]) -> dict[str, Any]:
    """Those of a manifest's files that hold no tensors."""
    folders = tuple(f"{folder}/" for folder in TENSORS)
    return {name: known for name, known in files.items() if not name.startswith(folders)}


def layer_name(layer: int) -> str:
    """The name of a layer's tensor ``[contexts, positions, d_model]``."""
    return f"layer_{layer:02d}"


def state_name(component: str, layer: int) -> str:
    """The name of a component's tensor ``[contexts, tokens, d_model]`` at a layer."""
    return f"{component}_{layer_name(layer)}"


def refuse_as_run(folder: Path) -> None:
    """Refuse a folder in which no run can be begun or resumed.

    Raises:
        UserError: the folder lies inside a run, can't be written to, or holds other files.
    """
    refuse_inside_run(folder)
    refuse_unwritable(folder, "give another --out or set IA_MECH_CACHE")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # A half-written run.json doesn't count.
    if RUN not in names and not all(name.startswith(f"{RUN}.") for name in names):
        raise UserError(f"{folder} holds files but no run", "give an empty or new folder as --out")


def refuse_inside_run(path: Path) -> None:
    """Refuse to write a user's output among a run's own files.

    Raises:
        UserError: the path lies in a run's folder.
    """
    for folder in path.resolve().parents:
        if (folder / RUN).is_file():
            raise UserError(f"{path} lies inside the run {folder}", "write it somewhere else")


def refuse_unwritable(folder: Path, remedy: str = "give another --out") -> None:
    """Refuse an output folder that can't be made or written to. The check leaves no file behind.

    Raises:
        UserError: a file stands in the path, or permission is lacking; its remedy is ``remedy``.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file", remedy)
    try:
        with tempfile.TemporaryFile(dir=there):  # os.access allows root everything, even in /proc
            pass
    except OSError as error:
        raise UserError(f"{there} is not writable ({error.strerror})", remedy) from None


def check_output(path: Path) -> None:
    """Refuse a file that can't be written, before its content is computed.

    Raises:
        UserError: the path is a folder or a device, or its folder isn't there or is a run's.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name a file in it")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file", "name another file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}", "make it first")
    refuse_unwritable(path.parent, "name a file in another folder")
    refuse_inside_run(path)
