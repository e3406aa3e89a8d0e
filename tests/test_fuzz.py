"""Every command on runs with one damaged file: the right result, or a refusal that names the file.

The run has everything that a command reads: several parts, generated responses, contrasts,
judgements of two judges, sheets and annotations of two people, a probe, results of experiments, a
perturbed run and the model's lens. A case is one file, one damage (:mod:`damages`) and one command.
The command is run in a process of its own, which may neither crash nor hang.

``IA_MECH_FUZZ`` is the number of cases, drawn evenly over kinds of files and damages from those
whose command reads the file, or ``all``.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from damages import DAMAGES, SWAPPED, Twins, Unfit, copied_by_links, draws
from judging import FakeJudge
from shell import files

from experiments.decoupling.__main__ import main as decoupling
from experiments.likelihood.__main__ import main as likelihood
from experiments.perturbations.__main__ import main as perturbations
from experiments.temperature_sweep.__main__ import main as temperature_sweep
from ia_mech.cli import guarded
from ia_mech.collect.command import main as sample
from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.judge.label import UNSEEN, label_run
from ia_mech.judge.rubric import ASSESSED, GENUINE
from ia_mech.judge.verdict import Item, Verdict
from ia_mech.rates.__main__ import main as rates
from ia_mech.run import Run, layout
from probes.card import Probe
from probes.train import main as train
from probes.transfer import main as transfer

CASES = os.environ.get("IA_MECH_FUZZ", "1000")
SEED = 0
REPAIR = "sample --repair"
SECONDS = 120  # that a command may take; the slowest takes two on an idle machine
CONVERSATIONS = 48
PART = 16  # contexts
OTHERWISE = ["--seed", "1", "--system", "Be brief."]  # of a run of the same conversations
Main = Callable[[list[str]], int]


# -- the run ------------------------------------------------------------------------------------

JUDGES, ANNOTATORS = ("rules", "planted"), ("anna", "bert")
JUDGED = ["--judge", "planted", "--resamples", "100"]
CELLS = ["--layers", "0", "2", "--positions", "header_last", "--permutations", "19"]
PERTURBED = ["--conditions", "ask", "header_only", "--limit", "12", "--samples", "1"]


def write_conversations(path: Path) -> None:
    """Two datasets whose responses can be verified: sums, and letters without commas."""
    rng = Random(SEED)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(CONVERSATIONS):
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            query = f"What is {a} plus {b}?" + " Please." * (number % 5)
            said = [("user", query), ("assistant", f"It is {a + b}.")]
            row = {
                "id": f"c{number:02d}",
                "dataset": ("letters", "sums")[number % 2],
                "messages": [{"role": role, "content": text} for role, text in said],
                "reference": f"And {a} minus {b}?" + " Thanks." * (number % 3),
            }
            if row["dataset"] == "sums":
                row["answer"] = str(a + b)
            else:
                without = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
                row["metadata"] = without
            file.write(json.dumps(row) + "\n")


def planted(item: Item, repeat: int) -> Verdict:
    """Half of all turns are genuine, whatever they say."""
    rng = Random("\0".join((item.query, item.response, item.turn)))
    return Verdict(GENUINE if rng.random() < 0.5 else rng.choice(ASSESSED), rationale="planted")


def sampling(place: Path, model: str, *more: str) -> list[str]:
    """The main job's flags."""
    words = "--limit all --response generate --max-response-tokens 8 --temperatures 0.7 1"
    words += " --samples 2 --max-new-tokens 6 --contrasts --swaps 2 --score-generations"
    words += " --batch-rows 30 --positions response_end header_last --threads 1"
    data = place.with_name("conversations.jsonl")
    words += f" --model {model} --dataset {data} --out {place / 'run'}"
    return [*words.split(), *more]


def filled_in(sheet: Path, seed: int) -> str:
    """A copy of an exported sheet with a category in every row."""
    rng = Random(seed)
    rows = [json.loads(line) for line in sheet.with_suffix(".jsonl").read_text().splitlines()]
    path = sheet.with_name(f"filled-{seed}.jsonl")
    lines = [json.dumps(row | {"category": rng.choice(ASSESSED)}) + "\n" for row in rows]
    path.write_text("".join(lines))
    return str(path)


def make(place: Path, model: str, *more: str) -> None:
    """A run with all that commands leave in it, in ``run``, ``perturbed`` and ``cache``."""
    run = str(place / "run")

    def must(main: Main, *words: str) -> None:
        assert main(list(words)) == 0, words

    must(sample, *sampling(place, model, *more))
    must(judge, "run", run)
    fake = FakeJudge(planted, paid=False)
    label_run(Run.open(run), fake, "planted", Quiet())
    (place / "sheets").mkdir()
    for number, annotator in enumerate(ANNOTATORS):
        sheet = place / "sheets" / annotator
        must(judge, "export", run, "--n", "60", "--by", "planted", "--out", str(sheet))
        filled = filled_in(sheet, number)
        must(judge, "import", run, filled, "--annotator", annotator)
    words = [run, *JUDGED]
    must(train, *words, *CELLS, "--threads", "1")
    for experiment in (temperature_sweep, likelihood, decoupling):
        must(experiment, *words)
    perturbing = [*words, *PERTURBED, "--out", str(place / "perturbed")]
    assert perturbations(perturbing) == 2  # the fake judge hasn't judged
    perturbed = Run.open(place / "perturbed" / "run")
    for unseen in (False, True):
        label_run(perturbed, fake, "planted" + UNSEEN * unseen, Quiet(), unperturbed=unseen)
    must(perturbations, *perturbing)


class Command(NamedTuple):
    """A command line."""

    main: Main
    words: list[str]


class Made(NamedTuple):
    """Where copies of the folder ``original`` are damaged, and the commands that are given there.

    ``other`` holds the same of another run.
    """

    place: Path
    original: Path
    other: Path
    commands: dict[str, Command]


@pytest.fixture(scope="module")
def made(tiny_model_dir, tmp_path_factory) -> Iterator[Made]:
    root = tmp_path_factory.mktemp("fuzz")
    write_conversations(root / "conversations.jsonl")
    place = root / "case"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_CONTEXTS", PART)
        # Figures take a second and are read by no command.
        for module in ("ia_mech.display", "probes.report.files"):
            patch.setattr(f"{module}.save_figure", lambda *_: [])
        patch.setenv("IA_MECH_CACHE", str(place / "cache"))
        for name, more in (("other", OTHERWISE), ("original", [])):
            (place / "cache").mkdir(parents=True)
            make(place, tiny_model_dir, *more)
            for lock in place.rglob("*.lock"):
                lock.unlink()
            os.rename(place, root / name)
        every = commands(place, tiny_model_dir)
        found = Made(place, root / "original", root / "other", every)
        before = files(found.original)
        yield found
        assert files(found.original) == before


# -- the commands -------------------------------------------------------------------------------


def read_all(words: list[str]) -> int:
    """Read everything there is in a run from Python."""

    def body() -> None:
        run = Run.open(words[0])
        print(run.digest(), run.complete, run.identity_digest, run.score_temperatures)
        for logits in run.header_logits():
            print(logits.sum().item())
        labels = run.labels
        for name in JUDGES:
            print(labels.record("judgements", name), labels.judgements(name).to_json())
        for name in ANNOTATORS:
            print(labels.record("annotations", name), labels.annotations(name).to_json())
            print(labels.sheet(name))

    return guarded(body, str)


def read_probe(words: list[str]) -> int:
    """Load a probe, and use it."""

    def body() -> None:
        probe = Probe.load(words[0])
        width = len(next(iter(probe.directions.values())).weights)
        for direction in probe.directions:
            print(direction, probe.probability([[0.5] * width], direction), probe.card["layer"])

    return guarded(body, str)


def repair(words: list[str]) -> int:
    """Sample again with ``--repair``."""

    def body() -> None:
        run = Run.open(words[words.index("--out") + 1])
        print(run.digest(), run.verify())

    return sample([*words, "--repair"]) or guarded(body, str)


def commands(place: Path, model: str) -> dict[str, Command]:
    """Every command that reads a run, to be given where :func:`make` made one."""
    run, out = str(place / "run"), place / "out"
    words = [run, *JUDGED]
    resumed = sampling(place, model)
    probe = str(place / "run" / "probes" / "rate-logistic-planted")
    filled = str(place / "sheets" / "filled-0.jsonl")
    people = ["--between", *JUDGES, *ANNOTATORS]

    def written(*kinds: str) -> list[str]:
        return [word for kind in kinds for word in (f"--{kind}", str(out / f"found.{kind}"))]

    return {
        "open": Command(read_all, [run]),
        "sample": Command(sample, resumed),
        REPAIR: Command(repair, resumed),
        "judge run": Command(judge, ["run", run]),
        "judge export": Command(
            judge, ["export", run, "--n", "20", "--by", "planted", "--out", str(out / "sheet")]
        ),
        "judge import": Command(judge, ["import", run, filled, "--annotator", "carl"]),
        "judge agreement": Command(judge, ["agreement", run, *people, *written("json", "csv")]),
        "rates": Command(
            rates, [*words, "--annotator", "anna", *written("json", "csv", "parquet")]
        ),
        "probes.train": Command(train, [*words, *CELLS, "--threads", "1"]),
        "probes.transfer": Command(
            transfer, [*words, *CELLS, "--by", "dataset", "--out", str(out / "found.parquet")]
        ),
        "Probe.load": Command(read_probe, [probe]),
        "temperature_sweep": Command(
            temperature_sweep, [*words, *["--temperatures", "1", "--positions", "header_last"]]
        ),
        "likelihood": Command(likelihood, words),
        "decoupling": Command(decoupling, words),
        "perturbations": Command(
            perturbations, [*words, *PERTURBED, "--out", str(place / "perturbed")]
        ),
    }


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        status: None if it took too long.
        out: what it printed.
        err: and to stderr.
        changed: every file that it wrote, replaced or removed, with the hash of its content (None:
            it is gone).
    """

    status: int | None
    out: str
    err: str
    changed: dict[str, str | None]


def _child(command: Command, streams: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(streams / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    try:
        status = command.main(command.words)
    except SystemExit as stopped:
        status = stopped.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def identities(folder: Path) -> dict[str, tuple]:
    """What is another when a file was written or replaced; locks hold nothing."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if path.suffix != ".lock" and name != ".lock":
                facts = path.lstat()
                found[str(path.relative_to(folder))] = (facts.st_ino, facts.st_size, facts.st_mtime)
    return found


def ended(command: Command, place: Path) -> Ended:
    """Run a command in a process of its own."""
    streams = place.with_name("streams")
    streams.mkdir(exist_ok=True)
    before = identities(place)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(command, streams))
    process.start()
    process.join(SECONDS)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    out, err = ((streams / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    out = re.sub(r"\bin \d+ s\b", "in N s", out)
    after = identities(place)
    changed = sorted({name for name, _ in before.items() ^ after.items()})
    hashes = {name: hash_of(place / name) for name in changed}
    return Ended(status, out, err, hashes)


def hash_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


@contextlib.contextmanager
def laid_out(made: Made) -> Iterator[Path]:
    copied_by_links(made.original, made.place)
    (made.place / "out").mkdir()
    try:
        yield made.place
    finally:
        shutil.rmtree(made.place)


# -- what is allowed ----------------------------------------------------------------------------

RIGHT, REFUSED = "right", "refused"
NOTED = "noted"  # it goes on without a file that isn't there, and says so


class Case(NamedTuple):
    """One damage of one file, at the place that number ``draw`` gives, and who reads it."""

    file: str
    damage: str
    draw: int
    command: str

    @property
    def kind(self) -> str:
        """Of the file: all parts are alike, and so are the layers above the embeddings."""
        return re.sub(r"layer_0[1-9]", "layer_N", re.sub(r"\d{5}", "N", self.file))

    @property
    def path(self) -> str:
        """Of the file, as a run or the cache names it."""
        return re.sub(r"^((perturbed/)?run|cache)/", "", self.file)


def judged(found: Ended, usual: Ended, case: Case, made: Made) -> str:
    """``right``, ``refused``, ``noted``, or what is wrong."""
    if found.status is None:
        return "HANGS"
    if found.status == 0:
        if found.out != usual.out:
            there = (made.place / case.file).is_file()
            said = case.path in "".join(found.out.split())
            return NOTED if said and not there else "WRONG OUTPUT"
        if case.command == REPAIR:
            return RIGHT  # under other names, but the digest is in the output
        # What others leave alone may have been mended.
        wrong = [
            name
            for name in sorted({*usual.changed, *found.changed})
            if found.changed.get(name)
            != (usual.changed[name] if name in usual.changed else hash_of(made.original / name))
        ]
        return f"WRONG FILES {', '.join(wrong)}" if wrong else RIGHT
    if found.status != 2:
        return f"STATUS {found.status}: {(found.err.splitlines() or [''])[-1]}"
    *progress, line = found.err.splitlines() or [""]
    several = any(other.startswith(("error: ", "Traceback")) for other in progress)
    if several or not line.startswith("error: ") or "; " not in line:
        return f"NOT ONE LINE: {found.err!r}"
    if not named(case, line, made):
        return f"UNNAMED: {line}"
    if found.changed:
        return f"WRITTEN: {', '.join(found.changed)}"
    return REFUSED


def named(case: Case, line: str, made: Made) -> bool:
    """Whether a line names the file: by its path, or labels by whose they are.

    Of a file that isn't there, and of one that was written for another place, the folder will do:
    it is what a command misses the file in, or what doesn't fit together.
    """
    path = made.place / case.file
    labels = path.parent.name in ("judgements", "annotations")
    folders = (path.parent, made.place / "run", made.place / "perturbed" / "run")
    folder_will_do = case.damage in SWAPPED or not path.is_file()
    return (
        case.path in line
        or (labels and f"{path.stem!r}" in line)
        or (folder_will_do and any(str(folder) in line for folder in folders))
    )


# -- the cases ----------------------------------------------------------------------------------


def read_by(command: Command, made: Made) -> set[str]:
    """Files that a command reads, by the times at which they were last read."""
    names = list(files(made.original))
    with laid_out(made):
        for name in names:
            os.utime(made.place / name, (0, os.stat(made.place / name).st_mtime))
        ended(command, made.place)
        # The original's: the command may have replaced what it read.
        return {name for name in names if os.stat(made.original / name).st_atime > 0}


def cases_of(made: Made) -> Iterator[Case]:
    """All cases in an order whose every beginning is spread evenly.

    Each round has one case of every kind of file with every damage, with a command at random. First
    come those whose command reads the file.
    """
    readers = {name: read_by(command, made) for name, command in made.commands.items()}
    every = [
        Case(file, damage, draw, command)
        for file in files(made.original)
        if not file.startswith("sheets/")  # people's own
        for damage, draw in draws()
        for command in made.commands
    ]
    for reads in (True, False):
        groups: dict[tuple[str, str], list[Case]] = {}
        for case in Random(SEED).sample(every, len(every)):
            if (case.file in readers[case.command]) == reads:
                groups.setdefault((case.kind, case.damage), []).append(case)
        for at in zip_longest(*groups.values()):
            yield from (case for case in at if case is not None)


def damage(case: Case, made: Made) -> None:
    """Damage the case's file where it is laid out; raises :class:`Unfit`."""
    path, original = made.place / case.file, made.original / case.file
    beside = [
        other
        for other in sorted(original.parent.iterdir())
        if other.suffix == path.suffix and other.name != path.name and other.is_file()
    ]
    rng = Random(f"{case.file} {case.damage} {case.draw}")
    DAMAGES[case.damage](path, rng, Twins(made.other / case.file, beside))


@pytest.mark.slow
def test_a_damaged_file_is_refused_by_name_or_makes_no_difference(made, capsys):
    usual = {}
    for name, command in made.commands.items():
        for _ in range(2):
            with laid_out(made):
                before, usual[name] = usual.get(name), ended(command, made.place)
        assert usual[name].status == 0, (name, usual[name])
        assert before._replace(err="") == usual[name]._replace(err=""), name
    count = None if CASES == "all" else int(CASES)
    outcomes: dict[str, Counter[str]] = {}  # by kind of file
    wrong: list[str] = []
    for case in cases_of(made):
        if sum(each.total() for each in outcomes.values()) == count:
            break
        with laid_out(made):
            try:
                damage(case, made)
            except Unfit:
                continue
            ending = ended(made.commands[case.command], made.place)
            outcome = judged(ending, usual[case.command], case, made)
        if outcome not in (RIGHT, REFUSED, NOTED):
            wrong.append(f"{case.kind} | {case.damage} {case.draw} | {case.command} | {outcome}")
            outcome = "wrong"
        outcomes.setdefault(case.kind, Counter())[outcome] += 1
    with capsys.disabled():
        for kind, each in (*sorted(outcomes.items()), ("all", sum(outcomes.values(), Counter()))):
            print(f"\n{each.total():6} {kind}: {dict(each)}", end="")
    assert not wrong, "\n".join(sorted(wrong))


def test_whatever_is_read_of_a_small_damaged_run_is_what_was_written(by_hand, tmp_path):
    """The same of a run without labels, read from Python: a moment's sample of the above."""
    digest = by_hand.digest()
    every = [(file, name) for file in files(by_hand.path) for name in DAMAGES]
    refused = 0
    for file, name in Random(SEED).sample(every, 100):
        copied_by_links(by_hand.path, tmp_path / "copy")
        with contextlib.suppress(Unfit):
            DAMAGES[name](tmp_path / "copy" / file, Random(name), Twins(None, []))
            try:
                assert Run.open(tmp_path / "copy").digest() == digest, (file, name)
            except UserError as error:
                assert file in str(error), (file, name, error)
                refused += 1
        shutil.rmtree(tmp_path / "copy")
    assert refused > 40
