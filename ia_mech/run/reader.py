"""Read a run: data frames for what is text and numbers, tensors read when asked for."""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ia_mech.errors import UserError
from ia_mech.run import integrity, layout
from ia_mech.run.labels import Labels
from ia_mech.run.notebook import Plots, html
from ia_mech.run.shards import read_record_and_manifest

EXACT_FROM = 0.3  # temperature from which float16 logits give first-token distributions
TURN_KEYS = ("order", "temperature", "sample")  # what generations are sorted by; contexts by order
_DIGEST_ROWS = 1024  # rows that are Python objects at a time


class Run:
    """A run's folder, read-only. Contexts are in the order of their conversations everywhere.

    A folder of complete shards is read as the run that they are together.

    Attributes:
        path: the folder.
        record: ``run.json``.
        complete: whether every context that was asked for is there.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        self.record, self._manifest = read_record_and_manifest(self.path, verify=verify)
        self.complete: bool = self._manifest["complete"]
        self._parts = self.parts("contexts")
        self._verify = verify
        self._verified: set[str] = set()  # files whose content was compared

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "Run":
        """Open a run, checking that every file its manifest names is there in full size.

        The content of a file is compared with the hash in the manifest when it is first read.

        Args:
            path: the run's folder.
            verify: compare contents; without, only sizes are compared.

        Raises:
            UserError: not a run, a run of another format, or a damaged part; shards that are
                missing or don't belong together.
        """
        run = cls(path, verify=verify)
        for part in run._manifest["parts"]:
            run._check(part, part["files"], content=False)
        return run

    @property
    def name(self) -> str:
        """Its folder's name: what files say of a run, which may be shared and moved."""
        return self.path.resolve().name

    def parts(self, kind: str) -> list[dict]:
        """The parts of a kind, as the manifest has them; those of shards name their ``folder``."""
        return [part for part in self._manifest["parts"] if part["kind"] == kind]

    @property
    def sessions(self) -> list[dict]:
        """When, on what machine and with what notes processes worked on the run."""
        return self._manifest["sessions"]

    @property
    def config(self) -> dict:
        """The configuration of the run, as it was asked for."""
        return self.record["identity"]["config"]

    @property
    def model(self) -> dict:
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
    def identity_digest(self) -> str:
        """Hash of what makes a run that run, wherever its folder lies."""
        text = json.dumps(self.record["identity"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def kept(self) -> dict[str, int]:
        """How many ``responses`` were written and how many ``contexts`` are whole so far."""
        return {
            kind: sum(part["contexts"] for part in self.parts(kind))
            for kind in ("responses", "contexts")
        }

    @property
    def score_temperatures(self) -> list[float]:
        """The temperatures of ``reference_logprob_tempered``, ascending; empty in older runs."""
        return list(self.record["identity"].get("score_temperatures", []))

    @cached_property
    def contexts(self) -> pd.DataFrame:
        """One row per context; the columns are listed in docs/run-format.md."""
        return self._table(layout.contexts_file, TURN_KEYS[:1]).to_pandas()

    @cached_property
    def generations(self) -> pd.DataFrame:
        """One row per generation: greedy (temperature 0) first, then by temperature and sample."""
        return self._table(layout.generations_file, TURN_KEYS).to_pandas()

    @cached_property
    def turns(self) -> pd.DataFrame:
        """What names each of the :attr:`generations`, in their order, and nothing that was written.

        Names (``layout.NAMES``) are categorical, their categories sorted.
        """
        columns = (*layout.NAMES, *layout.PLACE)
        if "generations" in vars(self):  # read already
            frame = self.generations[[name for name in self.generations if name in columns]]
            return frame.astype(dict.fromkeys(layout.NAMES, "category"))
        frame = self._table(layout.generations_file, TURN_KEYS, columns).to_pandas()
        for name in layout.NAMES:
            found = frame[name].cat.remove_unused_categories()
            frame[name] = found.cat.reorder_categories(sorted(found.cat.categories))
        return frame

    def windows(
        self, contexts: Sequence[str] = (), turns: Sequence[str] = ()
    ) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
        """The run part by part: memory holds some thousand contexts, however many there are.

        Args:
            contexts: columns of :attr:`contexts`; those that an older run lacks are left out.
            turns: columns of :attr:`generations`, likewise.

        Yields:
            The contexts of a part and all turns after them, both in the order of the run. The index
            of the turns is their position in :attr:`turns`.
        """
        if "generations" in vars(self):  # read already
            yield self.contexts.filter(contexts), self.generations.filter(turns)
            return
        every = self.turns["order"].to_numpy()
        for part in self._finished_parts():
            own = self._table(layout.contexts_file, TURN_KEYS[:1], contexts, [part])
            rows = self._table(layout.generations_file, TURN_KEYS, (*turns, "order"), [part])
            order = rows["order"].to_numpy()
            place = np.arange(len(order)) - np.searchsorted(order, order)  # within its context
            frame = rows.to_pandas().set_index(np.searchsorted(every, order) + place)
            yield own.to_pandas(), frame

    @property
    def responses(self) -> pd.DataFrame:
        """The responses that the model wrote so far, with the order of their contexts."""
        tables = [
            pq.read_table(self._file(part, layout.responses_file(part["name"])))
            for part in self.parts("responses")
        ]
        return pa.concat_tables([layout.RESPONSES.empty_table(), *tables]).to_pandas()

    @property
    def responses_complete(self) -> bool:
        """Whether the model has written every response that it was asked for."""
        return self.complete or self._manifest.get("responses_complete", False)

    @property
    def labels(self) -> Labels:
        """What judges and annotators say of the generations."""
        sealed = self._manifest["format"] != 1
        return Labels(self.path, self.identity_digest, sealed=sealed, verify=self._verify)

    @property
    def plot(self) -> Plots:
        """Figures: ``rates()``, ``reaction()`` and ``heatmap()``, of what was computed so far."""
        return Plots(self)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return html(self)

    def residuals(self, layer: int, position: str) -> Tensor:
        """The residual stream at one layer and position, ``[contexts, d_model]``.

        In the model's dtype, before the final norm, in the order of :attr:`contexts`. A context
        whose template lacks the position has NaN. Only that layer's files are read.

        Raises:
            UserError: no such layer, a position that wasn't kept, or no finished part yet.
        """
        if layer not in self.layers:
            raise UserError(
                f"layer {layer} is not in {self.path}",
                f"give 0 … {self.layers[-1]} (0 = embeddings)",
            )
        if position not in self.positions:
            raise UserError(
                f"position {position!r} was not kept in {self.path}",
                f"give one of {', '.join(self.positions)}",
            )
        at = self.positions.index(position)
        rows = []
        for part in self._finished_parts():
            file = self._file(part, layout.residuals_file(layer, part["name"]))
            try:
                with safe_open(file, framework="pt") as tensors:
                    rows.append(tensors.get_slice("residuals")[:, at])
            except (SafetensorError, OSError) as error:
                raise self._damaged(part["name"], error) from None
        return torch.cat(rows)[self._file_order]

    def header_logits(self) -> "HeaderLogits":
        """The logits at ``header_last``, read when asked for.

        Raises:
            UserError: the run was made with ``--header-logits none``, or has no finished part yet.
        """
        if self.config["header_logits"] == "none":
            raise UserError(f"{self.path} has no header logits", "sample with --header-logits full")
        parts = self._finished_parts()
        files = [self._file(part, layout.header_logits_file(part["name"])) for part in parts]
        counts = [part["contexts"] for part in parts]
        return HeaderLogits(files, counts, self._file_order.tolist(), self.model["vocab"])

    def verify(self) -> list[str]:
        """Compare the content of every file with its recorded hash; what is wrong, by part."""
        problems = []
        for part in self._manifest["parts"]:
            problem = integrity.damage(self.path, part["files"], content=True)
            if problem is not None:
                problems.append(f"part {part['name']}: {problem}")
        return problems

    def digest(self) -> str:
        """SHA-256 over the content of all rows and tensors, whatever the parts they lie in."""
        total = hashlib.sha256()
        for file in (layout.contexts_file, layout.generations_file):
            keys = TURN_KEYS[: 1 if file is layout.contexts_file else 3]
            for batch in self._table(file, keys).to_batches(max_chunksize=_DIGEST_ROWS):
                for row in batch.to_pylist():
                    total.update(json.dumps(row, sort_keys=True).encode())
        for layer in self.layers:
            for position in self.positions:
                kept = self.residuals(layer, position).contiguous()
                total.update(kept.view(torch.uint8).numpy().tobytes())
        if self.config["header_logits"] != "none":
            logits = self.header_logits()
            for index in range(len(logits)):
                for name, tensor in sorted(logits.stored(index).items()):
                    total.update(name.encode())
                    total.update(
                        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    )
        return total.hexdigest()

    # -- reading ------------------------------------------------------------------------------

    def _finished_parts(self) -> list[dict]:
        if not self._parts:
            lacking = "contexts" if self.complete else "finished part yet"
            remedy = "give the whole run" if self.complete else "let the run go on first"
            raise UserError(f"{self.path} holds no {lacking}", remedy)
        return self._parts

    def _file(self, part: dict, name: str) -> Path:
        """The path of one of a part's files; its content is compared the first time."""
        name = part.get("folder", "") + name
        if self._verify and name not in self._verified:
            self._check(part, {name: part["files"][name]}, content=True)
            self._verified.add(name)
        return self.path / name

    def _check(self, part: dict, files: dict, *, content: bool) -> None:
        problem = integrity.damage(self.path, files, content=content)
        if problem is not None:
            raise self._damaged(part["name"], problem)

    @cached_property
    def _file_order(self) -> Tensor:
        """``[contexts]``: where in the concatenated parts each context lies."""
        orders = [
            pq.read_table(self._file(part, layout.contexts_file(part["name"])), columns=["order"])
            for part in self._finished_parts()
        ]
        order = pa.concat_tables(orders)["order"].to_numpy()
        return torch.from_numpy(np.argsort(order, kind="stable"))

    def _table(
        self,
        file: Callable[[str], str],
        keys: Sequence[str],
        columns: Collection[str] | None = None,
        parts: Sequence[dict] | None = None,
    ) -> pa.Table:
        """Rows of parts (all if not given) sorted by ``keys``, with these columns (or all).

        If columns are chosen, names are dictionaries. Columns that older runs lack are left out.
        """
        tables = []
        for part in self._finished_parts() if parts is None else parts:
            path, chosen = self._file(part, file(part["name"])), {}
            try:  # unverified files may be damaged
                if columns is not None:
                    names = [n for n in pq.read_schema(path).names if n in columns or n in keys]
                    chosen = {"columns": names, "read_dictionary": list(layout.NAMES)}
                tables.append(pq.read_table(path, **chosen))
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(part["name"], error) from None
        table = pa.concat_tables(tables).unify_dictionaries()
        return table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in keys]))

    def _damaged(self, part: str, problem: object) -> UserError:
        return UserError(
            f"part {part} of {self.path} is damaged: {problem}",
            "run the command that wrote it again with --repair",
        )


class HeaderLogits:
    """The model's next-token distribution at ``header_last``, one context at a time.

    ``full`` files hold logits minus their maximum in float16, which keeps the first-token
    distribution at any temperature from :data:`EXACT_FROM` up to a total variation of 1e-3.
    ``top-k`` files hold the k largest and how much probability (at T = 1) the others have together.
    """

    def __init__(self, files: list[Path], counts: list[int], order: list[int], vocab: int) -> None:
        self.vocab = vocab
        self._places = [
            (file, row) for file, count in zip(files, counts, strict=True) for row in range(count)
        ]
        self._places = [self._places[i] for i in order]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def stored(self, index: int) -> dict[str, Tensor]:
        """What the file has for one context (in the order of ``Run.contexts``).

        Raises:
            UserError: there is no context of that number.
        """
        if not 0 <= index < len(self):
            raise UserError(
                f"there are header logits of {len(self)} contexts, none of number {index}",
                f"give 0 … {len(self) - 1}",
            )
        file, row = self._places[index]
        try:
            with safe_open(file, framework="pt") as tensors:
                return {key: tensors.get_slice(key)[row : row + 1][0] for key in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is damaged: {error}", "run the command that wrote it again with --repair"
            ) from None

    def __getitem__(self, index: int) -> Tensor:
        """Logits minus their maximum, ``[vocab]`` float32; -inf where top-k didn't keep them."""
        stored = self.stored(index)
        if "shifted" in stored:
            return stored["shifted"].float()
        logits = torch.full((self.vocab,), -torch.inf)
        logits[stored["indices"].long()] = stored["values"].float()
        return logits

    def log_probs(self, index: int, temperature: float = 1.0) -> Tensor:
        """Log-probabilities of the first token at a temperature, ``[vocab]`` float32, in nats.

        From a top-k file they are exact at T = 1 (the tail's mass is stored); at another
        temperature the tail's share isn't known. Below :data:`EXACT_FROM` it warns that float16
        is too coarse.

        Raises:
            UserError: a temperature that isn't above 0, a top-k file and one other than 1, or no
                context of that number.
        """
        if not 0 < temperature < math.inf:
            raise UserError(
                f"temperature {temperature} has no distribution",
                "give one above 0; greedy decoding takes the largest logit",
            )
        stored = self.stored(index)
        if "shifted" in stored:
            if temperature < EXACT_FROM:
                warnings.warn(
                    f"first-token distributions at T = {temperature:g} may be off by more than "
                    f"1e-3: logits in float16 are fine enough from T = {EXACT_FROM:g} up",
                    stacklevel=2,
                )
            return (stored["shifted"].float() / temperature).log_softmax(-1)
        if temperature != 1.0:
            raise UserError(
                "top-k header logits give the first-token distribution at T = 1 only",
                "sample with --header-logits full",
            )
        kept = self[index].log_softmax(-1)
        return kept + torch.log1p(-stored["tail_mass"].float())
