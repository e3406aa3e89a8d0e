"""Make one plain run of the shards of a run.

Usage::

    python -m ia_mech.merge cache/RUN
    python -m ia_mech.merge cache/RUN --remove-shards

The run is put together in a scratch folder and moved to its place, its manifest last: until then
the shards are the run, and they are only removed on demand.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.cli import Parser, guarded, one_line, path_of, quoted, tolerant_streams
from ia_mech.errors import UserError

if TYPE_CHECKING:
    from ia_mech.run import Run

DESCRIPTION = """\
Make one plain run of the shards that python -m ia_mech.sample --shard i/n wrote. Shards that are
missing, damaged, or of other weights or settings are refused by name. The rows, the tensors and
their digest stay what they are; labels stay valid.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    parser = Parser(prog="python -m ia_mech.merge", description=DESCRIPTION)
    parser.add_argument("run", type=path_of, help="folder of the run, which holds shards/")
    parser.add_argument(
        "--remove-shards", action="store_true", help="remove shards/ once the run is whole"
    )
    args = parser.parse_args(argv)

    def body() -> None:
        run = merge(args.run, remove=args.remove_shards)
        print(one_line(f"{run.kept['contexts']} contexts in one run: {run.path}"))
        if (run.path / "shards").is_dir():
            command = f"python -m ia_mech.merge {quoted(run.path)} --remove-shards"
            print(one_line(f"its shards are still there; to remove them: {command}"))

    return guarded(body, lambda: "the shards are as they were; the same command begins again")


def merge(path: Path, *, remove: bool = False) -> "Run":
    """Make one plain run of a run's shards.

    Args:
        path: the run's folder.
        remove: remove the shards afterwards, also those of an earlier call.

    Nothing is done to a run that is one already.

    Raises:
        UserError: no shards; some are missing, damaged or don't belong together; another process
            is merging them.
    """
    from filelock import FileLock, Timeout

    from ia_mech.run import Run, layout

    if not layout.shards_in(path) and not (path / layout.MANIFEST).is_file():
        raise UserError(
            f"{path} holds no shards", "give the --out of python -m ia_mech.sample --shard i/n"
        )
    run = Run.open(path)
    if problems := run.verify():
        raise UserError(
            f"{path} is damaged: {problems[0]}", "make that shard again with its --shard, --repair"
        )
    try:
        with FileLock(path / layout.LOCK, timeout=0):
            if not (path / layout.MANIFEST).is_file():
                _put_together(run)
            if remove and (path / layout.SHARDS).is_dir():
                shutil.rmtree(path / layout.SHARDS)
    except Timeout:
        raise UserError(f"{path} is being merged by another process", "wait for it") from None
    return Run.open(path)


def _put_together(run: "Run") -> None:
    from ia_mech.run import RunWriter, integrity, layout

    with integrity.scratch_folder(run.path / layout.SHARDS) as scratch:
        conversations = scratch / layout.CONVERSATIONS
        _join_conversations(run, conversations)
        made = scratch / "run"
        with RunWriter.create(made, run.record | {"shard": [1, 1]}, conversations) as writer:
            writer.manifest["sessions"] = run.sessions
            for kind in ("responses", "contexts"):
                writer.add_parts(kind, run.path, run.parts(kind))
            writer.finish_responses()
            writer.finish()
        last = [layout.RUN, layout.MANIFEST]
        names = sorted({path.name for path in made.iterdir()} - {*last, layout.LOCK})
        for name in [*names, *last]:
            place = run.path / name
            if place.is_dir():  # left by a call that was killed
                shutil.rmtree(place)
            os.replace(made / name, place)
        integrity.fsync_folder(run.path)


def _join_conversations(run: "Run", path: Path) -> None:
    """The snapshots of all shards as the run would have written them: buckets in order."""
    import pyarrow.parquet as pq

    from ia_mech.run import layout

    files = [
        pq.ParquetFile(run.path / name)
        for part in run.parts("conversations")
        for name in part["files"]
        if name.endswith(layout.CONVERSATIONS)
    ]
    groups = {
        file.metadata.row_group(group).column(0).statistics.min: (file, group)
        for file in files
        for group in range(file.num_row_groups)
    }
    with pq.ParquetWriter(path, files[0].schema_arrow, compression="zstd") as writer:
        for _, (file, group) in sorted(groups.items()):
            writer.write_table(file.read_row_group(group))


if __name__ == "__main__":
    sys.exit(main())
