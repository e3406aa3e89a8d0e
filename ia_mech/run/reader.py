"""Read a run: texts and numbers as data frames, and tensors when they are asked for.

torch is imported only where tensors are made, so that texts and numbers are there at once.
"""

import hashlib
import json
import math
import operator
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from ia_mech.cli import expanded, shell_word
from ia_mech.errors import UserError
from ia_mech.run import integrity, layout
from ia_mech.run.labels import KEY, Labels, choose_judge
from ia_mech.run.tokens import of_turns, token_names

if TYPE_CHECKING:
    from torch import Tensor

    from ia_mech.run.queries import Query

GROUPS = 20  # a field with more different values than these tells no groups apart
UNANSWERED = "raise --max-response-tokens, or keep them all with --unfinished, in another --out"
EXACT_FROM = 0.3  # the lowest temperature at which float16 logits are precise enough


class Run:
    """A run's folder, read-only. Contexts are in the order of their conversations everywhere.

    Attributes:
        path: the folder.
        record: ``run.json``.
        sessions: of each process that made parts of the run: when it began, its machine, its notes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = expanded(path)
        self.record, digest = integrity.read_record(self.path)
        self.sessions: list[dict[str, Any]] = []
        self._parts: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and name
        for file in sorted((self.path / layout.MANIFESTS).glob("*.json")):
            if not file.is_file():  # a link to nowhere, or a pipe
                continue
            part = integrity.read_manifest(file, digest)
            self._parts[part["kind"], part["name"]] = part
            if part["kind"] != layout.STATES and part["session"] not in self.sessions:
                self.sessions.append(part["session"])
        self.sessions.sort(key=lambda session: str(session.get("begun")))
        self._compared: set[str] = set()  # files whose hash has been compared

    @classmethod
    def open(cls, path: str | Path, *, unfinished: bool = False) -> "Run":
        """Open a run, checking that each file of text and numbers is there in full size; with
        ``unfinished``, also one of which parts are lacking.

        The content of every file is compared with its hash when the file is first read. Files of
        tensors (:data:`ia_mech.run.layout.TENSORS`) may be missing: texts, labels and rates can be
        read without them.

        Raises:
            UserError: the folder is no run or one of another format, a part is damaged, or parts
                are lacking.
        """
        run = cls(path)
        for part in run._parts.values():
            run._check(part, layout.texts_of(part["files"]), content=False)
        if not unfinished:
            run.check_finished()
        return run

    @property
    def name(self) -> str:
        """The name of the run's folder. Files hold this name, not the path: runs are moved."""
        return self.path.resolve().name

    def parts(self, kind: str) -> list[dict[str, Any]]:
        """The manifests of all whole parts of ``responses`` or ``contexts``, in the run's order."""
        return [self._parts[key] for key in sorted(self._parts) if key[0] == kind]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run: the flags of the command, with underscores."""
        return self.record["identity"]["settings"]

    @property
    def model(self) -> dict[str, Any]:
        """Facts on the subject model: name, hash of its weights, sizes, dtype."""
        return self.record["identity"]["model"]

    @property
    def command(self) -> str:
        """The shell command that makes this run, goes on with it, and computes lost parts again.

        The run's settings hold the name of a local model, adapter or file, but not its folder.
        """
        module = import_module("ia_mech.settings")  # named as text: settings are above runs
        settings = module.Settings.read(self.settings)
        return str(settings.command(self.path, self.model.get("device", "")))

    @property
    def layers(self) -> range:
        """Layer indices: 0 = embeddings, l = output of block l."""
        return range(self.model["layers"] + 1)

    @property
    def positions(self) -> dict[str, str | None]:
        """The positions whose residual stream was kept, in storage order: name → the token's text.

        The text is None at ``query_end`` and ``response_end``, whose token each context has its
        own, and in a run that was written without a tokenizer.
        """
        tokens = self.record.get("position_tokens", {})
        return {name: tokens.get(name) for name in self.record["identity"]["positions"]}

    @property
    def score_temperatures(self) -> list[float]:
        """The temperatures of ``real_follow_up_logprob_tempered``, ascending."""
        return list(self.record["identity"].get("score_temperatures", []))

    @property
    def identity_digest(self) -> str:
        """A hash of the run's identity (settings, model, data, …), wherever its folder lies."""
        text = json.dumps(self.record["identity"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def turns_digest(self) -> str:
        """A hash of the texts of all contexts and turns. Labels hold the hash of their texts."""
        both = hashlib.sha256(), hashlib.sha256()
        for frames in self.windows(["context_id", "text"], ["context_id", "text"]):
            for content, frame in zip(both, frames, strict=True):
                for row in frame.astype(object).to_numpy().tolist():
                    content.update(json.dumps(row).encode())
        return "".join(content.hexdigest()[:8] for content in both)

    @property
    def ignored_check(self) -> str:
        """What the engine's start-up check found although ``--ignore-check`` was given; else
        empty."""
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
        """How many ``responses`` and ``contexts`` are finished so far."""
        return {
            kind: sum(part["contexts"] for part in self.parts(kind)) for kind in layout.PART_KINDS
        }

    @cached_property
    def contexts(self) -> pd.DataFrame:
        """One row per context; the columns are listed in docs/python.md."""
        return _contexts(self._table("contexts"))

    @cached_property
    def generations(self) -> pd.DataFrame:
        """One row per generation: greedy (temperature 0) first, then by temperature, sampled tokens
        and sample."""
        return self._table("generations").to_pandas()

    @cached_property
    def unanswered(self) -> tuple[int, int]:
        """Two counts: queries without a context, since the model wrote too few finished responses
        that differ; and all queries that it wrote responses to."""
        wrote = self.responses
        if not len(wrote):
            return 0, 0
        queries = wrote.groupby("query")["order"].count()
        return int((queries == 0).sum()), len(queries)

    def refuse_unanswered(self) -> None:
        """Raise UserError if the run can't have any context, since all are of queries to which the
        model wrote too few finished responses that differ."""
        if (problem := self.unanswered_text) and (
            self.unanswered[0] * self.settings["responses"]
            == self.record["identity"]["conversations"]["count"]
        ):
            raise UserError(f"{self.path} can't have any user turn: {problem}", UNANSWERED)

    @property
    def unanswered_text(self) -> str:
        """How many queries are without a context, and why; empty if none is."""
        short, queries = self.unanswered
        if not short:
            return ""
        wrote, wanted = self.responses, self.settings["responses"]
        cut = int(wrote["finish_reason"].isin(layout.UNFINISHED).sum())
        return (
            f"{short} of {queries} queries have fewer than {wanted} distinct finished responses "
            f"({cut} of {len(wrote)} tries didn't end within "
            f"{self.settings['max_response_tokens']} tokens)"
        )

    @property
    def policies(self) -> pd.DataFrame:
        """Of each context whether its response was given, and its real follow-up."""
        return self._table("contexts", ["response_policy", "real_follow_up"]).to_pandas()

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The other columns of the data: a column per field, by context id. Columns of one kind of
        value have pandas' nullable types, so that a gap changes no number."""
        rows = [json.loads(text) for text in self.contexts["metadata"]]
        index = pd.Index(self.contexts["context_id"])
        fields = dict.fromkeys(chain.from_iterable(rows))
        columns = {field: _nullable([row.get(field) for row in rows], index) for field in fields}
        return pd.DataFrame(columns, index)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """The fields of :attr:`metadata` that can group contexts, as text: those with at most
        :data:`GROUPS` different values, none of them a list or an object. "–" stands where a
        context has no value."""
        found = {}
        for field, values in self.metadata.items():
            nested = values.map(lambda value: isinstance(value, dict | list)).any()
            texts = values.astype(object).where(values.notna(), "–").astype(str)
            if not nested and texts.nunique() <= GROUPS:
                found[field] = texts
        return pd.DataFrame(found, self.metadata.index)

    @cached_property
    def turns(self) -> pd.DataFrame:
        """The columns that identify each of the :attr:`generations`, in their order, without texts.

        The columns of ``layout.NAMES`` are categorical, with sorted categories.
        """
        frame = self._table("generations", [*layout.NAMES, *layout.PLACE]).to_pandas()
        for name in layout.NAMES:
            found = frame[name].cat.remove_unused_categories()
            frame[name] = found.cat.reorder_categories(sorted(found.cat.categories))
        return frame

    def drawn(self, turns: pd.DataFrame, tokens: int | None = None) -> pd.Series:
        """Of each of some turns whether it is greedy, or its first ``tokens`` tokens were sampled
        and no others; None stands for all."""
        wanted = self.settings["max_new_tokens"] if tokens is None else tokens
        return turns["sampled_tokens"].isin([0, wanted])

    def decoding(self, temperature: float, drawn: int) -> str:
        """How turns were decoded: ``greedy``, ``T = 0.7``, or ``T = 0.7, first 3 tokens``."""
        if not drawn:
            return "greedy"
        if self.settings["first_tokens"]:
            return f"each first token, by T = {temperature:g}"
        if drawn == self.settings["max_new_tokens"]:
            return f"T = {temperature:g}"
        return f"T = {temperature:g}, first {'token' if drawn == 1 else f'{drawn} tokens'}"

    def windows(
        self, contexts: Sequence[str] = (), turns: Sequence[str] = ()
    ) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
        """The run part by part, so that memory holds one part at a time.

        Args:
            contexts: columns of :attr:`contexts` to read.
            turns: columns of :attr:`generations` to read.

        Yields:
            The contexts of a part and all turns after them, both in the order of the run. The index
            of the turns is their row in :attr:`turns`.

        Raises:
            UserError: the run has no such column, or a part is damaged.
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
        """All responses that the model wrote so far, with the order of their contexts.

        Raises:
            UserError: a part is damaged.
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
        """What judges (programs) and annotators (people or models) say of the turns."""
        return Labels(self)

    def labelled(
        self,
        judge: str | None = None,
        annotator: str | None = None,
        columns: Sequence[str] = (),
        *,
        texts: bool = True,
    ) -> pd.DataFrame:
        """One row per user turn, in the order of :attr:`turns`, with its texts and labels.

        Args:
            judge: the name of a judge (a program that labelled the turns). It gives
                ``category`` (``failed`` where the judge gave none), ``follow_up`` and, beside
                texts, ``follow_up_probability`` (NaN where the judge gives no scores). With neither
                name given, :func:`ia_mech.run.labels.choose_judge` chooses.
            annotator: the name of an annotator (a person or a model who labelled a sheet). It
                gives ``truth_category`` and ``truth`` (whether the turn is a follow-up),
                ``inclusion`` (the probability that the turn was chosen for annotation),
                ``stratum``, ``sheet`` and ``note``; all are missing in turns without a label.
            columns: more columns of the judge's file (:data:`ia_mech.run.labels.JUDGEMENTS`).
            texts: whether to read ``query``, ``response`` and ``text`` (the turn's), and the
                other columns of the data (``data.topic``; :attr:`metadata`). Without them there is
                ``source`` (dataset and ``source_id`` in one key, the same in all runs).

        Returns:
            The columns of :attr:`turns`, of which ``source_id`` is the query's id;
            ``perturbation``, which is ``none`` for conversations as they are; ``unfinished``; the
            labels; and the texts. ``follow_up`` and ``truth`` are 1, 0, or NaN
            where the turn was not assessed.

        Raises:
            UserError: there are no such labels, they can't be read or belong to other turns; or a
                judge has to be named.
        """
        from ia_mech.run.labelled import (
            follow_up_probabilities,
            follow_ups_of,
            labelled_turns,
        )

        if judge is None and annotator is None:
            judge = choose_judge([self], None)
        of_judge = [*columns, "scores"] if texts and judge is not None else columns
        frame = labelled_turns(self.turns, self.labels, judge, annotator, of_judge)
        if not texts:
            return frame
        if judge is not None:
            follow_ups = follow_ups_of(self.labels.record("judgements", judge))
            chances = follow_up_probabilities(frame["scores"], follow_ups)
            frame = frame.assign(follow_up_probability=chances)
            frame = frame.drop(columns={"scores"} - {*columns})
        frame = frame.drop(columns="source").join(self._texts())
        return frame.join(self.metadata.add_prefix("data."), on="context_id")

    def _texts(self) -> pd.DataFrame:
        """``query``, ``response`` and ``text`` of each of :attr:`turns`."""
        from ia_mech.run.queries import exchange

        rows: list[tuple[str, str, str]] = []
        for contexts, turns in self.windows(["context_id", "messages"], ["context_id", "text"]):
            said = {row.context_id: exchange(row.messages) for row in contexts.itertuples()}
            pairs = zip(turns["context_id"], turns["text"], strict=True)
            rows += [(*said[context], text) for context, text in pairs]
        return pd.DataFrame(rows, columns=["query", "response", "text"], dtype=object)

    def decoys(self, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
        """Labels of decoys: of turns that were shown after a context which they didn't follow.

        Args:
            name: of a judge or annotator.
            columns: as for :meth:`labelled`.

        Returns:
            A row per label: the columns that identify the turn; ``row``, its row in :attr:`turns`;
            ``decoy``, the kind; ``shown``, the id of the context that was shown; ``source`` and
            ``shown_source``, the sources of the turn and of that context; ``category`` and
            ``follow_up``.

        Raises:
            UserError: as :meth:`labelled`.
        """
        from ia_mech.run.labelled import labelled_decoys

        return labelled_decoys(self.turns, self.labels, name, columns)

    def check_finished(self) -> None:
        """Raise UserError for a run that is still being written, or was left unfinished."""
        if not self.complete:
            self.refuse_unanswered()
            parts, planned = len(self.parts("contexts")), self.record["parts"]["contexts"]
            raise UserError(
                f"{self.path} is still being written or was interrupted ({parts} of {planned} "
                "parts)",
                "let the command that writes it finish, or go on with the same command (local "
                f"files are named without their folders here): {self.command}",
            )

    def __repr__(self) -> str:
        unfinished = "" if self.complete else ", unfinished"
        counted = f"{self.model['name']}, {self.counts['contexts']} conversations{unfinished}"
        kept = f"layers 0 … {self.layers[-1]}; positions {self._positions_text}"
        return f"Run({str(self.path)!r}: {counted}; {kept})"

    @property
    def _positions_text(self) -> str:
        """The kept positions with their tokens: ``response_end, turn_end '<|im_end|>', …``."""
        kept = self.positions.items()
        return ", ".join(name if token is None else f"{name} {token!r}" for name, token in kept)

    def residuals(
        self,
        layer: int | Sequence[int] | None = None,
        position: str | Sequence[str] | None = None,
        *,
        turns: pd.DataFrame | None = None,
        tokens: str | Sequence[str] | None = None,
        component: str = "resid",
    ) -> "Tensor":
        """The residual stream, ``[contexts, layers, positions, d_model]``.

        In the model's dtype, before the final norm, in the order of :attr:`contexts`. A context
        that lacks a position has NaN there.

        Args:
            layer: one layer, whose axis is left out, or a list of layers; all if not given. 0 is
                the embeddings, l the output of block l; -1 is the last layer, -2 the one before.
            position: one name of :attr:`positions`, whose axis is left out, or a list of names; all
                that were kept if not given.
            turns: rows with ``context_id``, such as some of :attr:`generations` or
                :meth:`labelled`. The first axis then has a row per turn, the state of the context
                that the turn followed, in the order of this frame.
            tokens: in place of positions, tokens that ``ia-mech capture`` has added, such as
                ``response:-1`` or ``turn:0``; one word for one token leaves the axis out. Tokens of
                a turn are those of ``turns``, or of each context's greedy turn.
            component: of tokens: ``resid``, or what a block's ``attn`` or ``mlp`` added.

        Raises:
            UserError: no such layer, tokens that weren't captured, a position that wasn't kept, a
                context that isn't in the run, a missing or damaged file of tensors, or no
                finished part yet.
        """
        import torch

        layers, one_layer = self._chosen_layers(layer)
        if tokens is not None or component != "resid":
            if tokens is None or position is not None:
                raise UserError(
                    f"a component {component!r} or tokens without positions' names",
                    "give tokens=, such as ['turn:0'], and no position=",
                )
            found = self._captured(layers, tokens, component, turns)
            return found[:, 0] if one_layer else found
        at: int | list[int] | slice = slice(None)
        if isinstance(position, str) or not isinstance(position, Iterable | None):
            at = self._position(position)
        elif position is not None:
            at = [self._position(name) for name in position]
        if [] in (layers, at):
            raise UserError("residuals of an empty list", "name a layer and a position, or neither")
        parts = self._finished_parts()
        found = torch.cat([torch.stack(self._residuals(part, layers, at), 1) for part in parts])
        found = found[:, 0] if one_layer else found
        return found if turns is None else found[self._rows_of(turns)]

    def layers_of(self, layer: Any) -> list[int]:
        """Layers counted from 0.

        Raises:
            UserError: no such layer.
        """
        return self._chosen_layers(layer)[0]

    def captured_layers(self, tokens: str | Sequence[str], component: str = "resid") -> list[int]:
        """The layers at which ``ia-mech capture`` has added all of these tokens."""
        there: dict[str, set[str]] = {name: set() for name in self._token_names(tokens)}
        for kept, about in self._states():
            for name in there.keys() & {*about["tokens"]}:
                there[name] |= {*kept.keys()}
        return [
            n
            for n in self.layers
            if all(layout.state_name(component, n) in of for of in there.values())
        ]

    def _token_names(self, words: str | Sequence[str]) -> list[str]:
        return token_names([words] if isinstance(words, str) else words)

    def _states(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The files of what was captured, each open, with the tokens and turns that it holds."""
        for part in self.parts(layout.STATES):
            file = self._file(part, layout.part_file(layout.STATES, part["name"]))
            with safe_open(file, framework="pt") as kept:
                yield kept, json.loads(kept.metadata()[layout.METADATA])

    def _captured(
        self,
        layers: list[int],
        words: str | Sequence[str],
        component: str,
        turns: pd.DataFrame | None,
    ) -> "Tensor":
        """``[turns, layers, tokens, d_model]`` of what was captured, by context of its greedy turn
        if no turns are given; one token's axis is left out."""
        import torch

        tokens = self._token_names(words)
        if turns is None:
            turns = self.turns[self.turns["temperature"] == 0]
        self._rows_of(turns)
        key = [*KEY] if of_turns(tokens) else ["context_id"]
        if lacking := [name for name in key if name not in turns]:
            raise UserError(
                f"turns have no column {lacking[0]}, which tells those of a context apart",
                "give rows of run.generations or run.labelled()",
            )
        wanted = [*turns[key].itertuples(index=False, name=None)]
        shape = len(wanted), len(layers), len(tokens)
        whole, there = torch.empty(*shape, self.model["d_model"]), np.zeros(shape, bool)
        for kept, about in self._states():  # each may hold some of the layers, tokens and turns
            names = [layout.state_name(component, layer) for layer in layers]
            names = [name if name in {*kept.keys()} else "" for name in names]
            for at, token in enumerate(tokens):
                if token not in about["tokens"] or not any(names):
                    continue
                end = len(key) if of_turns([token]) else 1  # a context's is that of all its turns
                row_of = {tuple(one[:end]): row for row, one in enumerate(about["turns"])}
                rows = {
                    n: row_of[own] for n, one in enumerate(wanted) if (own := one[:end]) in row_of
                }
                for n, name in enumerate(names):
                    if name and rows:
                        states = kept.get_tensor(name)[:, about["tokens"].index(token)]
                        whole = whole.to(states.dtype)
                        whole[[*rows], n, at] = states[[*rows.values()]]
                        there[[*rows], n, at] = True
        if missing := {one for one, has in zip(wanted, there, strict=True) if not has.all()}:
            temperatures = sorted({turn[1] for turn in missing}) if of_turns(tokens) else []
            raise UserError(
                f"{component} of {' '.join(tokens)} at layers {layers} isn't in {self.path}"
                + f" for {len(missing)} of {len({*wanted})} turns" * bool(temperatures),
                f"add it with: ia-mech capture {shell_word(self.path)} --tokens {' '.join(tokens)} "
                f"--layers {' '.join(map(str, layers))} --component {component}"
                + "".join([" --temperature", *(f" {one:g}" for one in temperatures)])
                * (temperatures not in ([], [0])),
            )
        return whole[:, :, 0] if isinstance(words, str) and len(tokens) == 1 else whole

    def _chosen_layers(self, layer: Any) -> tuple[list[int], bool]:
        """Layers counted from 0, and whether a single one was asked for."""
        if layer is None:
            return [*self.layers], False
        one = isinstance(layer, str) or not isinstance(layer, Iterable)
        found = []
        for number in [layer] if one else layer:
            try:
                found.append(self.layers[operator.index(number)])
            except (IndexError, TypeError):
                last = self.layers[-1]
                raise UserError(
                    f"{self.path} has no layer {number!r}",
                    f"give whole numbers: 0 (embeddings) … {last}, or -1 (the last) … {-1 - last}",
                ) from None
        return found, one

    def _position(self, name: Any) -> int:
        """The place of a position among those that were kept."""
        if name not in self.positions:
            raise UserError(
                f"position {name!r} was not kept in {self.path}",
                f"give one of {self._positions_text}",
            )
        return list(self.positions).index(name)

    def _rows_of(self, turns: pd.DataFrame) -> np.ndarray:
        """``[turns]`` the row of :attr:`contexts` that each turn followed."""
        if not isinstance(turns, pd.DataFrame) or "context_id" not in turns:
            raise UserError(
                "turns must be a data frame with the column context_id",
                "give rows of run.generations or run.labelled()",
            )
        contexts = pd.Index(self._table("contexts", ["context_id"])["context_id"].to_pylist())
        wanted = turns["context_id"].astype(object)
        rows = contexts.get_indexer(wanted)
        if (rows < 0).any():
            lacking = wanted.iloc[int(np.argmin(rows))]
            raise UserError(
                f"{self.path} has no context {lacking!r}", "give turns of this run alone"
            )
        return rows

    def _residuals(
        self, part: dict[str, Any], layers: Iterable[int], at: int | list[int] | slice = slice(None)
    ) -> "list[Tensor]":
        """``[contexts, positions, d_model]`` of each layer; one place leaves that axis out."""
        file = self._file(part, layout.part_file("residuals", part["name"]))
        try:
            with safe_open(file, framework="pt") as tensors:
                return [tensors.get_slice(layout.layer_name(layer))[:, at] for layer in layers]
        except (SafetensorError, OSError) as error:
            raise self._damaged(part, error) from None

    def header_logits(self) -> "HeaderLogits":
        """The logits that the first token of the turn is drawn from; each is read when asked for.

        Raises:
            UserError: the run was made with ``--header-logits none``, a file is missing or damaged,
                or the run has no finished part yet.
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
        return loading.load_files(spec).tokenizer

    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it.

        Raises:
            UserError: the model isn't on this machine and can't be downloaded.
        """
        return self._tokenizer

    def decode(self, ids: Iterable[Any]) -> Any:
        """The text of a list of token ids, special tokens included; a list of texts for several.

        Args:
            ids: one list of ids, or several, such as ``run.generations["token_ids"]``.

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
            temperatures: each above 0; the run's own if not given.
            k: how many tokens. The order of the tokens is the same at every temperature.

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
        """Compare the content of every file with its hash; returns a line per damaged part."""
        problems = []
        for kind in (*layout.PART_KINDS, layout.STATES):
            for part in self.parts(kind):
                problem = integrity.damage(self.path, part["files"], content=True)
                if problem is not None:
                    problems.append(f"part {part['name']}: {problem}")
        return problems

    def digest(self) -> str:
        """SHA-256 over the content of all rows and tensors. Parts don't matter."""
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
            self.refuse_unanswered()
            lacking = "contexts" if self.complete else "finished part yet"
            remedy = "sample conversations" if self.complete else "let the run go on first"
            raise UserError(f"{self.path} holds no {lacking}", remedy)
        return parts

    def _file(self, part: dict[str, Any], name: str) -> Path:
        """The path of a part's file, whose hash is compared when the path is first asked for."""
        if name not in part["files"]:
            raise self._damaged(part, f"{name} is not among its files")
        if name not in self._compared:
            self._check(part, {name: part["files"][name]}, content=True)
            self._compared.add(name)
        return self.path / name

    def _check(self, part: dict[str, Any], files: dict[str, Any], *, content: bool) -> None:
        problem = integrity.damage(self.path, files, content=content)
        if problem is not None:
            integrity.refuse_lost_folders(self.path, self.parts(part["kind"]))
            raise self._damaged(part, problem)

    def _table(
        self,
        table: str,
        columns: Collection[str] | None = None,
        parts: Sequence[dict[str, Any]] | None = None,
    ) -> pa.Table:
        """Rows of ``contexts`` or ``generations``, of these parts or all.

        Args:
            columns: to read, those of ``layout.NAMES`` as dictionaries; all columns, without
                dictionaries, if not given.
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
        again = f"compute the part again with: {self.command}"
        if part["kind"] == layout.STATES:
            again = "capture it again with the same ia-mech capture command"
        return UserError(
            f"part {part['name']} of {self.path} is damaged: {problem}",
            f"restore the file, or {again}",
        )


def _contexts(table: pa.Table) -> pd.DataFrame:
    """Contexts as a data frame. A message has only the keys that it had before it was stored."""
    frame = table.to_pandas()
    if "messages" in frame:
        stored = table["messages"].to_pylist()
        read = [[layout.message_of(one) for one in messages or ()] for messages in stored]
        frame["messages"] = pd.Series(read, frame.index, dtype=object)
    return frame


def _nullable(values: list[Any], index: pd.Index) -> pd.Series:
    """Values of JSON as a column; of several kinds, or beyond 64 bits, as Python objects."""
    kinds = {type(value) for value in values if value is not None}
    names = {bool: "boolean", int: "Int64", float: "Float64", str: "string"}
    try:
        return pd.Series(values, index, names.get(kinds.pop()) if len(kinds) == 1 else object)
    except OverflowError:
        return pd.Series(values, index, object)


def _add_tensor(streams: dict[str, Any], name: str, tensor: "Tensor") -> None:
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    streams[f"{name} {tensor.dtype}"].update(content)


def _add_values(streams: dict[str, Any], name: str, values: pa.Array) -> None:
    """Add a column's values to hashes, which don't depend on how the column is cut into pieces."""
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
    """The model's next-token distribution at the end of each context: at ``header_last``, or at the
    last token of an opening. One context is read at a time.

    Logits are stored as float16, after subtracting their maximum. At a temperature of
    :data:`EXACT_FROM` or more this changes the distribution by a total variation of at most 1e-3.

    Args:
        files: each file, and how many contexts it holds.
    """

    def __init__(self, files: Iterable[tuple[Path, int]]) -> None:
        self._places = [(file, row) for file, count in files for row in range(count)]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> "Iterator[Tensor]":
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> "Tensor":
        """The logits of a row of ``Run.contexts``, minus their maximum: ``[vocab]`` float32.

        Raises:
            UserError: there is no such row.
        """
        return self.stored(index).float()

    def stored(self, index: int) -> "Tensor":
        """The same logits in float16, as they are stored."""
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

        Below :data:`EXACT_FROM` a warning says that float16 is too coarse.

        Raises:
            UserError: the temperature isn't above 0, or there is no such row.
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
