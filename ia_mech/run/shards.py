"""Read the shards of a run as one: their parts together, under one record."""

from pathlib import Path

from ia_mech.errors import UserError
from ia_mech.run import integrity, layout

MISSING = "run the command that made the others with --shard i/n for each of these"


def read_record_and_manifest(path: Path, *, verify: bool = True) -> tuple[dict, dict]:
    """``run.json`` and ``manifest.json`` of a run, or what those of its shards are together.

    Args:
        path: the run's folder.
        verify: compare them with the manifest's hash and seal.

    Returns:
        Files of a shard's parts are named from the run's folder, which ``folder`` of a part leads
        to.

    Raises:
        UserError: not a run; shards that are missing, not finished, of several counts, or of other
            weights, data or settings; or as for a run.
    """
    shards = layout.shards_in(path)
    if not shards or (path / layout.MANIFEST).is_file():
        return integrity.read_record_and_manifest(path, verify=verify)
    of = _count(path, shards)
    missing = [f"{i}/{of}" for i in range(1, of + 1) if (i, of) not in shards]
    found = {}
    for number, _ in shards:
        folder = layout.shard_folder(path, number, of)
        found[number] = integrity.read_record_and_manifest(folder, verify=verify)
    unfinished = [f"{i}/{of}" for i, (_, manifest) in found.items() if not manifest["complete"]]
    if missing or unfinished:
        lacking = [("has no shard", missing), ("has not finished shard", unfinished)]
        said = [f"{what} {', '.join(names)}" for what, names in lacking if names]
        raise UserError(f"{path} {' and '.join(said)}", MISSING)
    first, *_ = (record for record, _ in found.values())
    for number, (record, _) in found.items():
        if record.get("shard") != [number, of]:
            raise UserError(
                f"{layout.shard_folder(path, number, of)} is not shard {number}/{of}",
                "give it the name that it had",
            )
        if differing := integrity.differences(first["identity"], record["identity"]):
            raise UserError(
                f"shards 1/{of} and {number}/{of} of {path} differ: "
                + ", ".join(f"{name} {values}" for name, values in differing.items()),
                "remove the one that is wrong, and make it again",
            )
    manifests = {number: manifest for number, (_, manifest) in found.items()}
    together = {
        "format": layout.FORMAT,
        "complete": True,
        "parts": [
            _from(layout.shard_folder(Path(), number, of), part)
            for number, manifest in manifests.items()
            for part in manifest["parts"]
        ],
        "sessions": [s for manifest in manifests.values() for s in manifest["sessions"]],
    }
    return {name: value for name, value in first.items() if name != "shard"}, together


def _count(path: Path, shards: list[tuple[int, int]]) -> int:
    """How many shards a run has.

    Raises:
        UserError: they are of several runs.
    """
    counts = sorted({of for _, of in shards})
    if len(counts) > 1:
        raise UserError(
            f"{path} holds shards of {' and of '.join(map(str, counts))}",
            f"remove those of one count under {path / layout.SHARDS}",
        )
    return counts[0]


def _from(folder: Path, part: dict) -> dict:
    """A part of a shard, as one of the whole run."""
    files = {f"{folder.as_posix()}/{name}": facts for name, facts in part["files"].items()}
    return part | {"files": files, "folder": f"{folder.as_posix()}/"}
