"""Named public datasets: where they lie on the hub, and how their rows are read.

All presets are **untried against the hub**: their ids, splits and columns are taken from dataset
cards and from public code that reads them, and are tested on rows of the same schema. A row that
lacks a column its preset expects is an error that says so, never a guess. Local files with these
schemas are read the same way.

To add a preset:

1. Add a :class:`Preset` to :data:`PRESETS`. Usual shapes need no code: ``convert=_named(format=…,
   query="column", …)`` names the columns; formats and roles are those of ``formats.ColumnMap``.
2. For other shapes, write a function ``(row, columns, place) -> Parts``. It must keep the columns
   that the user named (``columns``), open its errors with ``place``, and raise ``UserError`` where
   a row isn't of the expected shape. The row's checks happen later, in ``conversations.validate``.
3. Put a few invented rows of the real schema into ``tests/fixtures/presets/<name>.jsonl``: the
   tests read them as hub rows and as a local file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ia_mech.data.formats import ColumnMap, Parts, jsonable, parse
from ia_mech.errors import UserError

Convert = Callable[[dict, ColumnMap, str], Parts]
PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Preset:
    """One public dataset.

    Attributes:
        path, subset, split: hub id, configuration and split that are read by default.
        convert: from a row (with the user's columns and the row's place) to its parts.
        columns: the columns a row must have.
        streamed: read over the network row by row; otherwise downloaded once and cached.
        metadata: the columns that are kept as metadata; None keeps all that are left over.
        files: subset to file name, for repositories that declare no configurations.
        by_columns: local rows with these columns are read by this preset.
    """

    name: str
    path: str
    convert: Convert
    columns: tuple[str, ...]
    licence: str
    note: str
    subset: str | None = None
    split: str = "train"
    streamed: bool = False
    metadata: tuple[str, ...] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    by_columns: bool = False

    def parse(self, row: dict, columns: ColumnMap, place: str) -> Parts:
        """Read one row.

        Raises:
            UserError: a column is missing, or the row isn't of the expected shape.
        """
        missing = [name for name in self.columns if name not in row]
        if missing:
            raise UserError(
                f"{place}: preset {self.name} expects column {missing[0]!r} (found: "
                f"{', '.join(row) or 'none'})",
                "name the columns yourself (--query-column or --messages-column), or give the "
                "--revision of a version that has it",
            )
        parts = self.convert(row, columns, place)
        if self.metadata is not None:
            kept = {name: row[name] for name in self.metadata if name in row}
            parts.metadata = jsonable(kept) | parts.metadata
        return parts


def _named(**names: str) -> Convert:
    """A converter for rows of a usual shape with these columns; the user's id and cut stay."""

    def convert(row: dict, columns: ColumnMap, place: str) -> Parts:
        unset = {k: v for k, v in names.items() if k == "format" or getattr(columns, k) is None}
        return parse(row, replace(columns, **unset), place)

    return convert


def _healthbench(row: dict, columns: ColumnMap, place: str) -> Parts:
    needed = {"prompt": row["prompt"], "prompt_id": row["prompt_id"]}
    return _named(format="messages", messages="prompt", id="prompt_id")(
        _with_named(needed, row, columns), columns, place
    )


def _coval(row: dict, columns: ColumnMap, place: str) -> Parts:
    prompt, responses = row["prompt"], row["responses"]
    if not isinstance(prompt, dict) or not isinstance(prompt.get("messages"), list):
        raise UserError(
            f"{place}: preset coval expects an object with a list 'messages' in column 'prompt'",
            "use the subset 'comparisons', or convert the rows to a JSONL with messages",
        )
    needed = {"prompt": _one_system(prompt["messages"]), "prompt_id": row["prompt_id"]}
    parts = _named(format="messages", messages="prompt", id="prompt_id")(
        _with_named(needed, row, columns), columns, place
    )
    parts.metadata["candidates"] = len(responses) if isinstance(responses, list) else 0
    return parts


def _wildchat(row: dict, columns: ColumnMap, place: str) -> Parts:
    turns = row["conversation"]
    needed = {"conversation": turns, "conversation_hash": row["conversation_hash"]}
    parts = _named(format="messages", messages="conversation", id="conversation_hash")(
        _with_named(needed, row, columns), columns, place
    )
    # The hash is of the content: equal dialogues share it. They are one source with several rows,
    # which the identifier of the first turn tells apart.
    first = turns[0].get("turn_identifier") if turns else None
    if columns.id is None and parts.id is not None and first is not None:
        parts.source_id = parts.source_id or parts.id
        parts.id = f"{parts.id}-{first}"
    return parts


def _with_named(needed: dict, row: dict, columns: ColumnMap) -> dict:
    """``needed``, with the id and source columns that the user named."""
    named = [name for name in (columns.id, columns.source) if name in row]
    return needed | {name: row[name] for name in named}


def _one_system(messages: list) -> list:
    """The same messages with the leading system and developer messages joined into one."""
    leading = list(takewhile(_is_system, messages))
    if len(leading) < 2:
        return messages
    text = "\n\n".join(str(message.get("content")) for message in leading)
    return [{"role": "system", "content": text}, *messages[len(leading) :]]


def _is_system(message) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


_PROMPT_ONLY = "Queries with machine-checkable instructions; no responses."

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "gsm8k",
            path="openai/gsm8k",
            subset="main",
            split="test",
            convert=_named(format="qa", query="question"),
            licence="MIT",
            note="Worked solutions as responses, without calculator marks; gold answer.",
            columns=("question", "answer"),
        ),
        Preset(
            "math-500",
            path="HuggingFaceH4/MATH-500",
            split="test",
            convert=_named(
                format="qa", query="problem", response="solution", answer="answer", id="unique_id"
            ),
            licence="MIT (of MATH and PRM800K; the card names none)",
            note="Worked solutions as responses; gold answer.",
            columns=("problem", "solution", "answer", "unique_id"),
        ),
        Preset(
            "ifeval",
            path="google/IFEval",
            convert=_named(format="qa", query="prompt", id="key"),
            licence="Apache-2.0",
            note=_PROMPT_ONLY,
            columns=("key", "prompt", "instruction_id_list", "kwargs"),
        ),
        Preset(
            "ifbench",
            path="allenai/IFBench_test",
            convert=_named(format="qa", query="prompt", id="key"),
            licence="ODC-BY-1.0",
            note=_PROMPT_ONLY,
            columns=("key", "prompt", "instruction_id_list", "kwargs"),
        ),
        Preset(
            "healthbench",
            path="openai/healthbench",
            subset="full",
            convert=_healthbench,
            licence="MIT",
            note="Prompts of one or more turns; no responses, rubrics not kept.",
            columns=("prompt", "prompt_id", "rubrics"),
            metadata=("example_tags",),
            files={
                "full": "2025-05-07-06-14-12_oss_eval.jsonl",
                "hard": "hard_2025-05-08-21-00-10.jsonl",
                "consensus": "consensus_2025-05-09-20-00-46.jsonl",
            },
            by_columns=True,
        ),
        Preset(
            "coval",
            path="openai/coval",
            subset="comparisons",
            convert=_coval,
            licence="CC-BY-4.0",
            note="Value-sensitive prompts. The schema (prompt_id, prompt.messages, responses) is "
            "inferred from public code that reads it, not from the card. The candidate responses "
            "of other models and the annotators' assessments are not kept; no responses. Leading "
            "developer messages are joined into one system message.",
            columns=("prompt_id", "prompt", "responses"),
            metadata=(),
            by_columns=True,
        ),
        Preset(
            "mt-bench",
            path="HuggingFaceH4/mt_bench_prompts",
            convert=_named(format="turns", messages="prompt", id="prompt_id"),
            licence="Apache-2.0",
            note="Second turns written by people as references; the right answer where there is "
            "one; no responses.",
            columns=("prompt", "prompt_id", "category", "reference"),
        ),
        Preset(
            "wildchat",
            path="allenai/WildChat-1M",
            convert=_wildchat,
            licence="ODC-BY-1.0",
            streamed=True,
            note="Real dialogues with the users' real next turns. Equal dialogues share a source.",
            columns=("conversation", "conversation_hash"),
            metadata=("model", "language", "turn", "toxic", "redacted"),
            by_columns=True,
        ),
    )
}


def find(name: str) -> Preset | None:
    """The preset of this name; case, ``-`` and ``_`` don't matter."""

    def bare(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    return next((p for p in PRESETS.values() if bare(p.name) == bare(name)), None)


def recognise(row: dict) -> Preset | None:
    """The preset whose schema a local row has, where the usual shapes alone would misread it."""
    return next(
        (p for p in PRESETS.values() if p.by_columns and all(name in row for name in p.columns)),
        None,
    )


def open_hub(
    path: str,
    *,
    subset: str | None,
    split: str | None,
    revision: str | None,
    streamed: bool = True,
    files: Mapping[str, str] | None = None,
) -> tuple[Iterable[dict], str | None]:
    """Rows of a hub dataset, to be iterated as often as wanted, and the commit they are of.

    The hub is asked for the commit first: ``datasets`` itself takes twenty seconds of retries to
    notice that there is no network. With ``HF_HUB_OFFLINE=1`` that request is left out and datasets
    in the cache can be read (commit None).

    Raises:
        UserError: unknown, private or gated, no such subset or split, or out of reach.
    """
    file = None
    if files:
        file = files.get(subset or "")
        if file is None:
            raise UserError(f"{path} has no subset {subset!r}", f"use one of {', '.join(files)}")
    try:
        commit = _commit(path, revision)
        from datasets import load_dataset

        rows = load_dataset(
            path,
            name=None if files else subset,
            data_files=file,
            split=split,
            revision=commit or revision,
            streaming=streamed,
        )
    except Exception as error:  # five libraries raise here, each with exceptions of its own
        raise unreadable(path, error) from error
    if split is None:
        rows = _only_split(path, rows)
    return rows, commit


def unreadable(path: str, error: Exception) -> UserError:
    """What to tell the user when the hub or the network fails, in one line."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    reason = lines[0].strip()[:160] or kind
    if kind == "RepositoryNotFoundError":
        reason = "the hub has no such dataset, or it is private or gated"
    elif kind in ("ConnectError", "ConnectTimeout", "ReadTimeout"):
        reason = f"the hub could not be reached: {reason}"
    return UserError(
        f"dataset {path!r} could not be read ({reason})",
        "check the id, --subset, --split and HF_TOKEN, or download it on a machine with network "
        "and pass a local JSONL or Parquet file",
    )


def _commit(path: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    return HfApi().dataset_info(path, revision=revision, timeout=PROBE_SECONDS).sha


def _only_split(path: str, splits: Mapping[str, Iterable[dict]]) -> Iterable[dict]:
    if len(splits) != 1:
        raise UserError(
            f"dataset {path!r} has the splits {', '.join(splits)}", "choose one with --split"
        )
    return next(iter(splits.values()))
