"""Named public datasets: where they lie on the hub, and what their columns are called.

All presets are **untried against the hub**: their ids, splits and columns are taken from dataset
cards and from public code that reads them, and are tested on rows of the same schema. A row that
lacks a column its preset expects is an error that says so, never a guess. Local files with these
schemas are read the same way.

To add a preset, add a row to :data:`PRESETS`. ``reads`` says which columns hold what, by the names
of ``formats.ColumnMap``. Where that can't say it, ``adapt`` makes the columns out of the row; it
raises ``UserError`` where a row isn't of the expected shape, and opens its errors with ``place``.
Put a few invented rows of the real schema into ``tests/fixtures/presets/<name>.jsonl``: the tests
read them as hub rows and as a local file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile

from ia_mech.cli import expanded
from ia_mech.data.files import Rows, numbered
from ia_mech.data.formats import ColumnMap
from ia_mech.errors import UserError

PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Preset:
    """One public dataset.

    Attributes:
        path, subset, split: hub id, configuration and split that are read by default.
        needs: the columns a row must have.
        reads: format and columns, for what the user hasn't named.
        adapt: changes a row (given its place) into one that ``reads`` fits.
        keeps: the columns that are kept as metadata; None keeps all that are left over. A preset
            that keeps few reads all rows with the columns that it needs, local ones too.
        streamed: read over the network row by row; otherwise downloaded once and cached.
        files: subset to file name, for repositories that declare no configurations.
    """

    name: str
    path: str
    subset: str | None
    split: str | None
    needs: tuple[str, ...]
    reads: ColumnMap
    adapt: Callable[[dict, str], dict] = lambda row, place: row
    keeps: tuple[str, ...] | None = None
    streamed: bool = False
    files: Mapping[str, str] = field(default_factory=dict)

    def adapted(self, row: dict, columns: ColumnMap, place: str) -> tuple[dict, ColumnMap]:
        """A row, and what its columns are called, as ``formats`` reads them.

        Raises:
            UserError: a column is missing, or the row isn't of the expected shape.
        """
        missing = [name for name in self.needs if name not in row]
        if missing:
            raise UserError(
                f"{place}: preset {self.name} expects column {missing[0]!r} (found: "
                f"{', '.join(row) or 'none'})",
                "name the columns yourself (--query-column or --messages-column), or give the "
                "--revision of a version that has it",
            )
        row, given = self.adapt(row, place), asdict(columns)
        del given["format"]
        columns = replace(self.reads, **{k: v for k, v in given.items() if v})
        if self.keeps is not None:
            named = (*asdict(columns).values(), *self.keeps)
            row = {name: cell for name, cell in row.items() if name in named}
        return row, columns


def _coval(row: dict, place: str) -> dict:
    """Leading system and developer messages joined into one; the responses are counted only."""
    prompt, responses = row["prompt"], row["responses"]
    if not isinstance(prompt, dict) or not isinstance(prompt.get("messages"), list):
        raise UserError(
            f"{place}: preset coval expects an object with a list 'messages' in column 'prompt'",
            "use the subset 'comparisons', or convert the rows to a JSONL with messages",
        )
    messages = prompt["messages"]
    leading = list(takewhile(_is_system, messages))
    if len(leading) > 1:
        text = "\n\n".join(str(message.get("content")) for message in leading)
        messages = [{"role": "system", "content": text}, *messages[len(leading) :]]
    candidates = len(responses) if isinstance(responses, list) else 0
    return row | {"prompt": messages, "candidates": candidates}


def _is_system(message) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _wildchat(row: dict, place: str) -> dict:
    """Equal dialogues share a hash, which is of the content: they are one source with several rows,
    which the identifier of the first turn tells apart."""
    turns, name = row["conversation"], row["conversation_hash"]
    opened = isinstance(turns, list) and turns and isinstance(turns[0], dict)
    first = turns[0].get("turn_identifier") if opened else None
    return row | {"row_id": name if first is None else f"{name}-{first}"}


_CHECKABLE = ("key", "prompt", "instruction_id_list", "kwargs")  # instructions; no responses

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        # MIT. Worked solutions as responses, without calculator marks; gold answer.
        Preset(
            *("gsm8k", "openai/gsm8k", "main", "test"),
            needs=("question", "answer"),
            reads=ColumnMap("qa", query="question"),
        ),
        # MIT (of MATH and PRM800K; the card names none). Worked solutions; gold answer.
        Preset(
            *("math-500", "HuggingFaceH4/MATH-500", None, "test"),
            needs=("problem", "solution", "answer", "unique_id"),
            reads=ColumnMap(
                "qa", query="problem", response="solution", answer="answer", id="unique_id"
            ),
        ),
        # Apache-2.0.
        Preset(
            *("ifeval", "google/IFEval", None, "train"),
            needs=_CHECKABLE,
            reads=ColumnMap("qa", query="prompt", id="key"),
        ),
        # ODC-BY-1.0.
        Preset(
            *("ifbench", "allenai/IFBench_test", None, "train"),
            needs=_CHECKABLE,
            reads=ColumnMap("qa", query="prompt", id="key"),
        ),
        # MIT. Prompts of one or more turns; no responses, rubrics not kept.
        Preset(
            *("healthbench", "openai/healthbench", "full", "train"),
            needs=("prompt", "prompt_id", "rubrics"),
            reads=ColumnMap("messages", messages="prompt", id="prompt_id"),
            keeps=("example_tags",),
            files={
                "full": "2025-05-07-06-14-12_oss_eval.jsonl",
                "hard": "hard_2025-05-08-21-00-10.jsonl",
                "consensus": "consensus_2025-05-09-20-00-46.jsonl",
            },
        ),
        # CC-BY-4.0. Value-sensitive prompts; no responses. The schema is inferred from public code
        # that reads it, not from the card. Responses of other models and annotators' assessments
        # are not kept.
        Preset(
            *("coval", "openai/coval", "comparisons", "train"),
            needs=("prompt_id", "prompt", "responses"),
            reads=ColumnMap("messages", messages="prompt", id="prompt_id"),
            adapt=_coval,
            keeps=("candidates",),
        ),
        # Apache-2.0. Second turns written by people are the real follow-ups; the right answer
        # where there is one; no responses.
        Preset(
            *("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train"),
            needs=("prompt", "prompt_id", "category", "reference"),
            reads=ColumnMap("turns", messages="prompt", id="prompt_id"),
        ),
        # ODC-BY-1.0. Real dialogues with the users' real next turns.
        Preset(
            *("wildchat", "allenai/WildChat-1M", None, "train"),
            needs=("conversation", "conversation_hash"),
            reads=ColumnMap(
                "messages", messages="conversation", id="row_id", source="conversation_hash"
            ),
            adapt=_wildchat,
            keeps=("model", "language", "turn", "toxic", "redacted"),
            streamed=True,
        ),
    )
}


def find(name: str) -> Preset | None:
    """The preset of this name; case, ``-`` and ``_`` don't matter."""
    bare = {known.replace("-", ""): preset for known, preset in PRESETS.items()}
    return bare.get(name.lower().replace("-", "").replace("_", ""))


def recognise(row: dict) -> Preset | None:
    """The preset whose schema a row has, where the usual shapes alone would misread it."""
    found = (p for p in PRESETS.values() if p.keeps and all(name in row for name in p.needs))
    return next(found, None)


def open_hub(
    preset: Preset, subset: str | None, split: str | None, revision: str | None
) -> tuple[str, Rows, dict]:
    """The rows of a hub dataset, and what is recorded of them.

    The hub is asked for the commit first: ``datasets`` itself takes twenty seconds of retries to
    notice that there is no network. With ``HF_HUB_OFFLINE=1`` that request is left out and datasets
    in the cache can be read (commit None).

    Raises:
        UserError: unknown, private or gated, no such subset or split, or out of reach.
    """
    path, subset, split = preset.path, subset or preset.subset, split or preset.split
    if preset.files and subset not in preset.files:
        raise UserError(f"{path} has no subset {subset!r}", f"use one of {', '.join(preset.files)}")
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi, constants

        expanded(constants.HF_HUB_CACHE)  # without a home folder it would be ./~
        if not constants.HF_HUB_OFFLINE:
            asked = HfApi().dataset_info(path, revision=revision, timeout=PROBE_SECONDS)
            revision = asked.sha
        rows = load_dataset(
            path,
            name=None if preset.files else subset,
            data_files=preset.files.get(subset or ""),
            split=split,
            revision=revision,
            streaming=preset.streamed,
        )
    except Exception as error:  # five libraries raise here, each with exceptions of its own
        raise unreadable(path, error) from error
    if split is None:
        if len(rows) != 1:
            raise UserError(
                f"dataset {path!r} has the splits {', '.join(rows)}", "choose one with --split"
            )
        (rows,) = rows.values()
    found = {"path": path, "subset": subset, "split": split, "revision": revision}
    count = getattr(rows, "num_rows", None)  # of a stream nobody knows
    return preset.name, (partial(_rows, rows, preset.name), lambda: count), found


def _rows(rows: Iterable[dict], name: str) -> Iterator[tuple[str, dict]]:
    try:
        yield from numbered(rows, name)
    except Exception as error:  # the network can fail at any row of a stream
        raise unreadable(name, error) from error


def unreadable(path: str, error: Exception) -> UserError:
    """What to tell the user when the hub or the network fails, in one line."""
    line = next(iter(str(error).strip().splitlines()), "")[:160]
    return UserError(
        f"dataset {path!r} could not be read ({type(error).__name__}: {line})",
        "check the id, --subset, --split and HF_TOKEN, or download it on a machine with network "
        "and pass a local JSONL or Parquet file",
    )
