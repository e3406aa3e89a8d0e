"""Read a run: data frames for what is text and numbers, tensors read when asked for.

torch is imported where tensors are made: whoever wants texts and numbers has them at once.
"""

import hashlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from ia_mech.errors import UserError
from ia_mech.run import integrity, layout
from ia_mech.run.labels import Labels
from ia_mech.untrusted import visible

if TYPE_CHECKING:
    from torch import Tensor

    from ia_mech.run.queries import Query

GROUPS = 20  # different values of a field of the data that tells groups apart, at most
EXACT_FROM = 0.3  # temperature from which float16 logits give first-token distributions


class Run:
    """A run's folder, read-only. Contexts are in the order of their conversations everywhere.

    Attributes:
        path: the folder.
        record: ``run.json``.
        sessions: when, on what machine and with what notes the processes ran that made its parts.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.record, digest = integrity.read_record(self.path)
        self.sessions: list[dict[str, Any]] = []
        self._parts: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and name
        for file in sorted((self.path / layout.MANIFESTS).glob("*.json")):
            try:
                part = integrity.read_manifest(file, digest)
            except FileNotFoundError:  # dropped at this moment, by a process that computes it again
                continue
            self._parts[part["kind"], part["name"]] = part
            if part["session"] not in self.sessions:
                self.sessions.append(part["session"])
        self.sessions.sort(key=lambda session: str(session.get("begun")))
        self._compared: set[str] = set()  # files whose content was compared with its hash

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open a run, checking that every file its manifests name is there in full size.

        The content of a file is compared with its hash when it is first read. A copy may lack the
        folders of tensors (:data:`ia_mech.run.layout.TENSORS`): all but these can be read of it.

        Raises:
            UserError: not a run, a run of another format, or a damaged part.
        """
        run = cls(path)
        absent = tuple(f"{name}/" for name in layout.TENSORS if not (run.path / name).exists())
        for part in run._parts.values():
            files = {
                name: fact for name, fact in part["files"].items() if not name.startswith(absent)
            }
            run._check(part, files, content=False)
        return run

    @property
    def name(self) -> str:
        """Its folder's name: what files say of a run, which may be shared and moved."""
        return self.path.resolve().name

    def parts(self, kind: str) -> list[dict[str, Any]]:
        """The manifests of a kind's parts that are whole, in the order of the run."""
        return [self._parts[key] for key in sorted(self._parts) if key[0] == kind]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run: the flags of the command, with underscores."""
        return self.record["identity"]["settings"]

    @property
    def model(self) -> dict[str, Any]:
        """What the run knows of the subject model: name, hash of its weights, sizes, dtype."""
        return self.record["identity"]["model"]

    @property
    def layers(self) -> range:
        """Layer indices: 0 = embeddings, l = output of block l."""
        return range(self.model["layers"] + 1)

    @property
    def positions(self) -> list[str]:
        """Names of the positions whose residual stream was kept, in storage order."""
        return list(self.record["identity"]["positions"])

    @property
    def score_temperatures(self) -> list[float]:
        """The temperatures of ``real_follow_up_logprob_tempered``, ascending."""
        return list(self.record["identity"].get("score_temperatures", []))

    @property
    def identity_digest(self) -> str:
        """Hash of what makes a run that run, wherever its folder lies."""
        text = json.dumps(self.record["identity"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def turns_digest(self) -> str:
        """Hash of the texts of all contexts and turns: what labels are labels of."""
        both = hashlib.sha256(), hashlib.sha256()
        for frames in self.windows(["context_id", "text"], ["context_id", "text"]):
            for content, frame in zip(both, frames, strict=True):
                for row in frame.astype(object).to_numpy().tolist():
                    content.update(json.dumps(row).encode())
        return "".join(content.hexdigest()[:8] for content in both)

    @property
    def ignored_check(self) -> str:
        """What the engine's start-up check found where ``--ignore-check`` went on; else empty."""
        found = {str(one["ignored_check"]) for one in self.sessions if "ignored_check" in one}
        return "; ".join(sorted(found))

    @property
    def complete(self) -> bool:
        """Whether every part that was planned is there."""
        planned = self.record["parts"]
        return all(
            (kind, name) in self._parts
            for kind in layout.PART_KINDS
            for name in layout.part_names(planned[kind])
        )

    @property
    def counts(self) -> dict[str, int]:
        """How many ``responses`` were written and how many ``contexts`` are whole so far."""
        return {
            kind: sum(part["contexts"] for part in self.parts(kind)) for kind in layout.PART_KINDS
        }

    @cached_property
    def contexts(self) -> pd.DataFrame:
        """One row per context; the columns are listed in docs/run-format.md."""
        return _contexts(self._table("contexts"))

    @cached_property
    def generations(self) -> pd.DataFrame:
        """One row per generation: greedy (temperature 0) first, then by temperature and sample."""
        return self._table("generations").to_pandas()

    @cached_property
    def unanswered(self) -> tuple[int, int]:
        """Queries to which the model wrote too few responses that are finished and differ, so that
        they have no context, and all that it wrote responses to."""
        wrote = self.responses
        if not len(wrote):
            return 0, 0
        queries = wrote.groupby("query")["order"].count()
        return int((queries == 0).sum()), len(queries)

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """What the data say of each conversation besides it: a column per field, by context id."""
        rows = [json.loads(text) for text in self.contexts["metadata"]]
        return pd.DataFrame(rows, pd.Index(self.contexts["context_id"]))

    @cached_property
    def groups(self) -> pd.DataFrame:
        """The fields of :attr:`metadata` that tell groups of contexts apart, as text: those with at
        most :data:`GROUPS` different values that are no lists or objects; "–" where a context has
        none."""
        found = {}
        for field, values in self.metadata.items():
            nested = values.map(lambda value: isinstance(value, dict | list)).any()
            texts = values.astype(object).where(values.notna(), "–").astype(str)
            if not nested and texts.nunique() <= GROUPS:
                found[field] = texts
        return pd.DataFrame(found, self.metadata.index)

    @cached_property
    def turns(self) -> pd.DataFrame:
        """What names each of the :attr:`generations`, in their order, and nothing that was written.

        Names (``layout.NAMES``) are categorical, their categories sorted.
        """
        frame = self._table("generations", [*layout.NAMES, *layout.PLACE]).to_pandas()
        for name in layout.NAMES:
            found = frame[name].cat.remove_unused_categories()
            frame[name] = found.cat.reorder_categories(sorted(found.cat.categories))
        return frame

    def windows(
        self, contexts: Sequence[str] = (), turns: Sequence[str] = ()
    ) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
        """The run part by part: memory holds one part, however many there are.

        Yields:
            The contexts of a part and all turns after them, both in the order of the run. The index
            of the turns is their position in :attr:`turns`.

        Raises:
            UserError: a run has no such column, or a damaged part.
        """
        part = self._finished_parts()[0]
        for table, wanted in (("contexts", contexts), ("generations", turns)):
            name = layout.part_file(table, part["name"])
            there = pq.read_schema(self._file(part, name)).names
            if unknown := [column for column in wanted if column not in there]:
                raise UserError(
                    f"{self.path / name} has no column {unknown[0]!r}",
                    f"choose from {', '.join(there)}",
                )
        contexts = [*dict.fromkeys(["order", *contexts])]
        turns = [*dict.fromkeys([*layout.TURN_KEYS, *turns])]
        begin = 0
        for part in self._finished_parts():
            own = _contexts(self._table("contexts", contexts, [part]))
            rows = self._table("generations", turns, [part]).to_pandas()
            rows.index = pd.RangeIndex(begin, begin + len(rows))
            begin += len(rows)
            yield own, rows

    @property
    def responses(self) -> pd.DataFrame:
        """The responses that the model wrote so far: all draws, with the order of their contexts.

        Raises:
            UserError: a damaged part.
        """
        tables = [
            self._read(part, "responses") for part in self.parts("responses") if part["files"]
        ]
        return pa.concat_tables([layout.RESPONSES.empty_table(), *tables]).to_pandas()

    def queries(self) -> "list[Query]":
        """The queries in their order, each with its responses and the turns after them.

        Raises:
            UserError: contexts of one ``source_id`` have several queries.
        """
        from ia_mech.run.queries import queries_of

        return queries_of([self])

    @property
    def labels(self) -> Labels:
        """What judges and annotators say of the generations."""
        return Labels(self)

    def labelled(
        self, judge: str | None = None, annotator: str | None = None, columns: Sequence[str] = ()
    ) -> pd.DataFrame:
        """One row per user turn, in the order of :attr:`turns`, with its labels.

        Args:
            judge: whose verdicts: ``category`` (``failed`` where it gave none) and ``follow_up``;
                the run's only judge if nobody is named.
            annotator: whose labels: ``truth_category`` and ``truth`` (whether it is a follow-up),
                ``inclusion`` (the probability of being chosen for annotation), ``stratum``,
                ``sheet`` and ``note``; missing where it labelled nothing.
            columns: further columns of the judge's file (:data:`ia_mech.run.labels.JUDGEMENTS`).

        Returns:
            The columns of :attr:`turns`; ``source``, a key that holds across runs;
            ``perturbation``, ``none`` where there is none; ``unfinished``; and the labels.
            ``follow_up`` and ``truth`` are 1, 0, or NaN where it wasn't assessed.

        Raises:
            UserError: no such labels, or ones that can't be read or are of other turns; nobody is
                named, and the run has no judge or several.
        """
        from ia_mech.run.labelled import labelled_turns

        if judge is None and annotator is None:
            judges = self.labels.judges
            if len(judges) != 1:
                named = ", ".join(judges)
                raise UserError(
                    f"{self.path} has {f'verdicts of {named}' if judges else 'not been judged'}",
                    f"name one: run.labelled({judges[0]!r})"
                    if judges
                    else f"ia_mech.label(run), or ia-mech judge run {self.path}",
                )
            (judge,) = judges
        return labelled_turns(self.turns, self.labels, judge, annotator, columns)

    def decoys(self, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
        """One row per label that a judge or annotator gave a turn after a context that it didn't
        follow.

        Returns:
            What names the turn; ``row``, its position in :attr:`turns`; ``decoy``, the kind;
            ``shown``, the context's id; ``source`` and ``shown_source``, of the turn and of that
            context; ``category`` and ``follow_up``.

        Raises:
            UserError: as :meth:`labelled`.
        """
        from ia_mech.run.labelled import labelled_decoys

        return labelled_decoys(self.turns, self.labels, name, columns)

    def check_finished(self) -> None:
        """Raise UserError for a run that is still being written, or was left unfinished."""
        if not self.complete:
            parts, planned = len(self.parts("contexts")), self.record["parts"]["contexts"]
            raise UserError(
                f"{self.path} is still being written or was interrupted ({parts} of {planned} "
                "parts)",
                "let the command that writes it finish, or give that command again",
            )

    def __repr__(self) -> str:
        unfinished = "" if self.complete else ", unfinished"
        counted = f"{self.model['name']}, {self.counts['contexts']} contexts{unfinished}"
        return f"Run({str(self.path)!r}: {counted})"

    def _repr_html_(self) -> str:
        rows = {
            "folder": self.path,
            "model": self.model["name"],
            "dataset": self.settings["dataset"],
            "contexts": f"{self.counts['contexts']}{'' if self.complete else ' so far'}",
            "temperatures": ", ".join(["greedy", *map(str, self.settings["temperatures"])]),
            "judges": ", ".join(self.labels.judges) or "none",
        }
        cells = (
            f"<tr><th>{name}</th><td>{escape(visible(str(value)))}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table>{''.join(cells)}</table>"

    def residuals(self, layer: int | None = None, position: str | None = None) -> "Tensor":
        """The residual stream, ``[contexts, layers + 1, positions, d_model]``.

        In the model's dtype, before the final norm, in the order of :attr:`contexts`. A context
        whose template lacks a position has NaN there.

        Args:
            layer: the only one that is read; its axis is left out.
            position: likewise.

        Raises:
            UserError: no such layer, a position that wasn't kept, or no finished part yet.
        """
        import torch

        if layer is not None and layer not in self.layers:
            raise UserError(
                f"layer {layer} is not in {self.path}",
                f"give 0 … {self.layers[-1]} (0 = embeddings)",
            )
        if position is not None and position not in self.positions:
            raise UserError(
                f"position {position!r} was not kept in {self.path}",
                f"give one of {', '.join(self.positions)}",
            )
        at = slice(None) if position is None else self.positions.index(position)
        layers = self.layers if layer is None else [layer]
        parts = self._finished_parts()
        found = torch.cat([torch.stack(self._residuals(part, layers, at), 1) for part in parts])
        return found if layer is None else found[:, 0]

    def _residuals(
        self, part: dict[str, Any], layers: Iterable[int], at: int | slice = slice(None)
    ) -> "list[Tensor]":
        file = self._file(part, layout.part_file("residuals", part["name"]))
        try:
            with safe_open(file, framework="pt") as tensors:
                return [tensors.get_slice(layout.layer_name(layer))[:, at] for layer in layers]
        except (SafetensorError, OSError) as error:
            raise self._damaged(part, error) from None

    def header_logits(self) -> "HeaderLogits":
        """The logits that the first token of the turn is drawn from, read when asked for.

        Raises:
            UserError: the run was made with ``--header-logits none``, or has no finished part yet.
        """
        if self.settings["header_logits"] == "none":
            raise UserError(f"{self.path} has no header logits", "sample with --header-logits full")
        return HeaderLogits(map(self._header_logits_file, self._finished_parts()))

    def _header_logits_file(self, part: dict[str, Any]) -> tuple[Path, int]:
        """A part's file, and of how many contexts it holds logits."""
        file = self._file(part, layout.part_file("header_logits", part["name"]))
        try:
            with safe_open(file, framework="pt") as tensors:
                return file, tensors.get_slice(layout.LOGITS).get_shape()[0]
        except (SafetensorError, OSError) as error:
            raise self._damaged(part, error) from None

    @cached_property
    def _tokenizer(self) -> Any:
        loading = import_module("ia_mech.models.load")  # named as text: a run is read without it
        spec = loading.recall(self.settings, self.model["weights_hash"])
        return loading.load_tokenizer_and_config(spec)[0]

    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it.

        Raises:
            UserError: the model is neither on this machine nor to be had.
        """
        return self._tokenizer

    def decode(self, ids: Iterable[Any]) -> Any:
        """The text of token ids, special tokens included; of several lists, a list of texts.

        Args:
            ids: such as ``run.generations["token_ids"]``, or one row of it.

        Raises:
            UserError: as :meth:`tokenizer`.
        """
        wanted = "give run.generations['token_ids'], or one row of it"
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise UserError(f"{ids!r} is no list of token ids", wanted)
        several = [one.tolist() if hasattr(one, "tolist") else one for one in ids]
        if several and isinstance(several[0], Iterable):
            return [self.decode(one) for one in several]
        for one in several:
            if not isinstance(one, int) or not 0 <= one < self.model["vocab"]:
                raise UserError(f"{one!r} is no token id of {self.model['name']}", wanted)
        return self.tokenizer().decode(several, clean_up_tokenization_spaces=False)

    def top_tokens(
        self, context_id: str, temperatures: Sequence[float] = (), k: int = 5
    ) -> pd.DataFrame:
        """The likeliest first tokens of the user turn after a context.

        Args:
            context_id: as in :attr:`contexts`.
            temperatures: each above 0; those of the run if none is given.
            k: how many tokens. They are the same at every temperature, which only moves
                probability among them.

        Returns:
            A row per token, the likeliest first: ``token_id``, ``token`` (its text), and its
            probability in a column per temperature.

        Raises:
            UserError: no such context or temperature (:meth:`HeaderLogits.log_probs`); or as
                :meth:`header_logits` and :meth:`tokenizer`.
        """
        ids = self.contexts["context_id"]
        found = np.flatnonzero(ids == context_id)
        if not len(found):
            raise UserError(
                f"{self.path} has no context {context_id!r}",
                f"give a context_id of run.contexts, such as {ids.iloc[0]!r}",
            )
        if not isinstance(k, int) or k < 1:
            raise UserError(f"{k!r} tokens", "give k, a whole number from 1 up")
        if isinstance(temperatures, str) or not isinstance(temperatures, Iterable):
            raise UserError(f"temperatures {temperatures!r} are no list", "give (0.7, 1.0)")
        index, logits = int(found[0]), self.header_logits()
        top = logits[index].topk(min(k, self.model["vocab"])).indices
        columns = {
            temperature: logits.log_probs(index, temperature)[top].exp().numpy()
            for temperature in temperatures or self.settings["temperatures"]
        }
        named = {"token_id": top.numpy(), "token": self.decode(top[:, None])}
        return pd.DataFrame(named | columns)

    def verify(self) -> list[str]:
        """Compare the content of every file with its recorded hash; what is wrong, by part."""
        problems = []
        for kind in layout.PART_KINDS:
            for part in self.parts(kind):
                problem = integrity.damage(self.path, part["files"], content=True)
                if problem is not None:
                    problems.append(f"part {part['name']}: {problem}")
        return problems

    def digest(self) -> str:
        """SHA-256 over the content of all rows and tensors, whatever the parts they lie in."""
        streams: dict[str, Any] = defaultdict(hashlib.sha256)
        for part in self._finished_parts():
            for table in ("contexts", "generations"):
                rows = self._table(table, parts=[part])
                for name, column in zip(rows.column_names, rows.columns, strict=True):
                    for chunk in column.chunks:
                        _add_values(streams, f"{table}.{name}", chunk)
            for layer, states in enumerate(self._residuals(part, self.layers)):
                _add_tensor(streams, f"layer_{layer}", states)
        if self.settings["header_logits"] != "none":
            logits = self.header_logits()
            for index in range(len(logits)):
                _add_tensor(streams, f"header_logits.{layout.LOGITS}", logits.stored(index))
        total = hashlib.sha256()
        for name, stream in sorted(streams.items()):
            total.update(f"{name} {stream.hexdigest()}\n".encode())
        return total.hexdigest()

    # -- reading ------------------------------------------------------------------------------

    def _finished_parts(self) -> list[dict[str, Any]]:
        """The parts with contexts, in the order of the run."""
        parts = [part for part in self.parts("contexts") if part["contexts"]]
        if not parts:
            lacking = "contexts" if self.complete else "finished part yet"
            remedy = "sample conversations" if self.complete else "let the run go on first"
            raise UserError(f"{self.path} holds no {lacking}", remedy)
        return parts

    def _file(self, part: dict[str, Any], name: str) -> Path:
        """The path of one of a part's files; its content is compared the first time."""
        if name not in part["files"]:
            raise self._damaged(part, f"{name} is not among its files")
        folder = name.partition("/")[0]
        if folder in layout.TENSORS and not (self.path / folder).exists():
            raise UserError(f"{self.path} is a copy without {folder}", "use the run itself")
        if name not in self._compared:
            self._check(part, {name: part["files"][name]}, content=True)
            self._compared.add(name)
        return self.path / name

    def _check(self, part: dict[str, Any], files: dict[str, Any], *, content: bool) -> None:
        problem = integrity.damage(self.path, files, content=content)
        if problem is not None:
            raise self._damaged(part, problem)

    def _table(
        self,
        table: str,
        columns: Collection[str] | None = None,
        parts: Sequence[dict[str, Any]] | None = None,
    ) -> pa.Table:
        """Rows of ``contexts`` or ``generations``, with these columns or all.

        If columns are chosen, names are dictionaries. Of all parts if none are given.
        """
        tables = [
            self._read(part, table, columns)
            for part in (self._finished_parts() if parts is None else parts)
        ]
        return pa.concat_tables(tables).unify_dictionaries()

    def _read(
        self, part: dict[str, Any], table: str, columns: Collection[str] | None = None
    ) -> pa.Table:
        path, chosen = self._file(part, layout.part_file(table, part["name"])), {}
        if columns is not None:
            chosen = {"columns": list(columns), "read_dictionary": layout.NAMES}
        try:
            return pq.read_table(path, **chosen)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(part, error) from None

    def _damaged(self, part: dict[str, Any], problem: object) -> UserError:
        return UserError(
            f"part {part['name']} of {self.path} is damaged: {problem}",
            "give the command that made the run again, without --shard: it computes the part again",
        )


def _contexts(table: pa.Table) -> pd.DataFrame:
    """Contexts whose messages have the keys that they were stored with, and no others."""
    frame = table.to_pandas()
    if "messages" in frame:
        stored = table["messages"].to_pylist()
        read = [[layout.message_of(one) for one in messages or ()] for messages in stored]
        frame["messages"] = pd.Series(read, frame.index, dtype=object)
    return frame


def _add_tensor(streams: dict[str, Any], name: str, tensor: "Tensor") -> None:
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    streams[f"{name} {tensor.dtype}"].update(content)


def _add_values(streams: dict[str, Any], name: str, values: pa.Array) -> None:
    """Add a column's values to hashes that don't depend on how the column is cut into pieces."""
    streams[f"{name} valid"].update(values.is_valid().to_numpy(zero_copy_only=False).tobytes())
    kind = values.type
    if pa.types.is_struct(kind):
        for field, inner in zip(kind, values.flatten(), strict=True):
            _add_values(streams, f"{name}.{field.name}", inner)
    elif pa.types.is_list(kind):
        streams[f"{name} length"].update(_bytes_of(pc.list_value_length(values)))
        _add_values(streams, f"{name}[]", values.flatten())
    elif pa.types.is_string(kind):
        streams[f"{name} length"].update(_bytes_of(pc.binary_length(values)))
        streams[name].update("".join(text or "" for text in values.to_pylist()).encode())
    else:
        streams[name].update(_bytes_of(values))


def _bytes_of(numbers: pa.Array) -> bytes:
    zero = pa.scalar(0).cast(numbers.type)
    return pc.fill_null(numbers, zero).to_numpy(zero_copy_only=False).tobytes()


class HeaderLogits:
    """The model's next-token distribution at the end of each context, one at a time: that of
    ``header_last``, or of the last token of an opening.

    Logits less their maximum in float16 keep the first-token distribution at any temperature from
    :data:`EXACT_FROM` up to a total variation of 1e-3.

    Args:
        files: each with how many contexts it holds.
    """

    def __init__(self, files: Iterable[tuple[Path, int]]) -> None:
        self._places = [(file, row) for file, count in files for row in range(count)]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> "Iterator[Tensor]":
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> "Tensor":
        """Logits less their maximum, ``[vocab]`` float32, of a row of ``Run.contexts``.

        Raises:
            UserError: there is no context of that number.
        """
        return self.stored(index).float()

    def stored(self, index: int) -> "Tensor":
        """The same in float16, as the file has it."""
        if not isinstance(index, int | np.integer) or not 0 <= index < len(self):
            raise UserError(
                f"there are header logits of {len(self)} contexts, none of number {index!r}",
                f"give 0 … {len(self) - 1}, a row of run.contexts",
            )
        file, row = self._places[index]
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(layout.LOGITS)[row]

    def log_probs(self, index: int, temperature: float = 1.0) -> "Tensor":
        """Log-probabilities of the first token at a temperature, ``[vocab]`` float32, in nats.

        Below :data:`EXACT_FROM` it warns that float16 is too coarse.

        Raises:
            UserError: a temperature that isn't above 0, or no context of that number.
        """
        if not 0 < temperature < math.inf:
            raise UserError(
                f"temperature {temperature} has no distribution",
                "give one above 0; greedy decoding takes the largest logit",
            )
        if temperature < EXACT_FROM:
            warnings.warn(
                f"first-token distributions at T = {temperature:g} may be off by more than "
                f"1e-3: logits in float16 are fine enough from T = {EXACT_FROM:g} up",
                stacklevel=2,
            )
        return (self[index] / temperature).log_softmax(-1)
