"""A run in shards that need no coordination: which shard a process is to make, and where.

Contexts are dealt into buckets by a hash of their source (:func:`ia_mech.engine.plan.bucket_of`),
and shard i of n has every n-th bucket. Batches never cross buckets, so rows don't depend on n.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ia_mech.collect.config import flag_of
from ia_mech.errors import UserError
from ia_mech.run import Run, layout
from ia_mech.run.writer import refuse_another

PATIENCE = 30.0  # seconds in which torchrun ends a rank after another one
POLL = 1.0  # seconds between two looks at what other processes have written


@dataclass(frozen=True)
class Shard:
    """Shard ``number`` (from 1) of ``of``; 1 of 1 is the whole run."""

    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From ``i/n``.

        Raises:
            UserError: anything else.
        """
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(
                f"--shard {text} is no shard", "give i/n with i from 1 to n, such as 2/4"
            )
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], together: int = 1) -> "Shard":
        """What a Slurm array, torchrun, or torchrun in each task of an array says; else 1 of 1.

        Args:
            together: so many ranks of torchrun make one shard, those of consecutive numbers.

        Raises:
            UserError: variables that are not whole numbers, or no shard.
        """
        task, tasks = _task(environ)
        rank, ranks = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
        if not 0 <= rank < ranks:
            raise UserError(
                f"RANK {rank} of WORLD_SIZE {ranks} is no rank", "unset both, or give --shard i/n"
            )
        groups = max(1, ranks // together)
        return cls(task * groups + rank // together + 1, tasks * groups)

    def folder(self, out: Path) -> Path:
        """Where the shard of the run ``out`` is."""
        return layout.shard_folder(out, self.number, self.of)

    @property
    def others(self) -> "list[Shard]":
        """The other shards of the same run."""
        return [Shard(k, self.of) for k in range(1, self.of + 1) if k != self.number]

    def holds(self, bucket: int) -> bool:
        """Whether a bucket is the shard's."""
        return bucket % self.of == self.number - 1


WHOLE = Shard()


def _task(environ: Mapping[str, str]) -> tuple[int, int]:
    """The index, from 0, and the number of the tasks of a Slurm array."""
    name = "SLURM_ARRAY_TASK_"
    if f"{name}ID" not in environ:
        return 0, 1
    first, step = _number(environ, f"{name}MIN", 0), _number(environ, f"{name}STEP", 1)
    number, count = _number(environ, f"{name}ID", 0), _number(environ, f"{name}COUNT", 1)
    index, rest = divmod(number - first, max(step, 1))
    if rest or not 0 <= index < count:
        raise UserError(
            f"task {number} of the Slurm array is none of {count} evenly spaced ones from {first}",
            "use --array=1-N, or give --shard i/n",
        )
    return index, count


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(f"{name}={text} is not a whole number", f"unset {name}, or give --shard")
    return int(text)


@dataclass(frozen=True)
class Rank:
    """Which of torchrun's processes this is.

    Attributes:
        number, of: among all of them.
        local, here: among those of this machine.
        together: so many of them hold the model of one shard.
    """

    number: int = 0
    of: int = 1
    local: int = 0
    here: int = 1
    together: int = 1

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], together: int = 1) -> "Rank":
        """From torchrun's variables.

        Args:
            together: as the attribute.

        Raises:
            UserError: no whole numbers, or no multiple of ``together`` ranks.
        """
        rank, ranks = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
        local, here = _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", 1)
        if ranks % together:
            if rank:
                time.sleep(PATIENCE)  # the first one says it, and torchrun then ends all
            raise UserError(
                f"--tensor-parallel {together}: {ranks} process(es) are no multiple of it",
                f"start the command with torchrun --nproc-per-node {together}, or a multiple",
            )
        return cls(rank, ranks, local, here, together)

    @property
    def several(self) -> bool:
        """Whether other shards are made, too, by ranks that torchrun ends if one fails."""
        return self.of > self.together

    @property
    def leads(self) -> bool:
        """Whether it is the first, or the only one, of those that make its shard."""
        return self.number % self.together == 0

    def threads(self, now: int) -> int:
        """Of a process on a CPU: its share of the cores, where torchrun would leave it one."""
        return now if self.here == 1 else max(1, (os.cpu_count() or 1) // self.here)

    def take_device(self, device: str) -> None:
        """Make this machine's GPU of the same number the one that ``auto`` and ``cuda`` mean.

        Raises:
            UserError: there are fewer GPUs than ranks.
        """
        if self.here == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
            return
        count = torch.cuda.device_count()
        if self.local >= count:
            raise UserError(
                f"rank {self.local} of this machine has no GPU ({count} here)",
                f"start torchrun with --nproc-per-node {count}, or use --device cpu",
            )
        torch.cuda.set_device(self.local)


def named(shards: Sequence[Shard]) -> str:
    """Shards in a message: ``shard 2/4``, or ``shards 2/4, 3/4``."""
    shown = [str(shard) for shard in shards[:8]] + ["…"] * (len(shards) > 8)
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(shown)}"


def refuse_differing(out: Path, shard: Shard, identity: dict) -> None:
    """Refuse to make a shard that differs from one that is there.

    Raises:
        UserError: it is of other weights, data or settings; all differences are named.
    """
    for other in shard.others:
        folder = other.folder(out)
        if (folder / layout.RUN).is_file():
            refuse_another(folder, Run(folder).record["identity"], identity, flag_of)
            return  # which was compared with the ones before it


def responses_of_others(out: Path, shard: Shard, wait: bool) -> list[dict]:
    """The responses that the model wrote in the other shards of a run.

    Args:
        out: the run's folder.
        shard: the one that wants them.
        wait: until all are written; only where a launcher ends all processes if one fails.

    Raises:
        UserError: some are not written yet.
    """
    lacking = wait_for(out, shard.others, lambda run: run.responses_complete, wait)
    if lacking:
        raise UserError(
            f"contrasts need the responses of all shards of {out}, and {named(lacking)} "
            f"{'has' if len(lacking) == 1 else 'have'} not written them all",
            "run every shard with --phase responses first",
        )
    runs = [Run(other.folder(out)) for other in shard.others]
    return [row for run in runs for row in run.responses.to_dict("records")]


def wait_for(
    out: Path, shards: Sequence[Shard], ready: Callable[[Run], bool], wait: bool = True
) -> list[Shard]:
    """The shards that are not there, or not ready; with ``wait``, return once there are none."""

    def is_ready(shard: Shard) -> bool:
        folder = shard.folder(out)
        return (folder / layout.RUN).is_file() and ready(Run(folder))

    lacking = [shard for shard in shards if not is_ready(shard)]
    while wait and lacking:
        time.sleep(POLL)
        lacking = [shard for shard in lacking if not is_ready(shard)]
    return lacking
