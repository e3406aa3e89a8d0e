"""How often do user turns follow up, and where in the model is that decided?

One command for a whole study of one model. The model writes several responses to each query, and
after each a greedy user turn, turns whose first token alone is sampled at T = 0.7, and turns with
all tokens sampled. A judge labels the turns. The first sentences say how often they are follow-ups,
and whether sampling brings out follow-ups that greedy decoding hides (latent ones). Further
sentences say how much the first token decides, how many bits turns tell about their response, and
which states carry these bits. One page reports it all. Every stage is also a command of its own;
--dry-run lists them. If the study is stopped, the same command continues.

Needs: a model. Cost: the embedded model (135M) on two cores takes some two hours, with --quick
ten minutes.

    ia-mech study smollm2-135m-instruct --quick
    ia-mech study Qwen/Qwen3-0.6B --queries 60 --out cache/qwen3
    ia-mech study qwen2.5-coder-1.5b-instruct --dry-run
"""

import argparse
import importlib
import io
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.change import RESPONSES
from experiments.experiment import flag
from experiments.locate import MAPS, NO_MAPS, USUAL_MAPS, drawings
from experiments.shown import TOO_FEW, headline, print_plan, too_few
from ia_mech.cli import (
    Parser,
    add_ray,
    add_workers,
    go_on,
    nonblank,
    one_line,
    path_of,
    program,
    run_command,
    shell_word,
    tolerant_streams,
    whole_from,
)
from ia_mech.console import COMMANDS
from ia_mech.display import console, with_style
from ia_mech.errors import UserError
from ia_mech.estimates import all_datasets
from ia_mech.models.embedded import cache_dir, refuse_missing_model
from ia_mech.rates.fit import highest, marked
from ia_mech.rates.latent import verdict
from ia_mech.results import (
    Result,
    about_runs,
    folder_of,
    kind_of,
    read,
    sentences_of,
    show,
    write,
)
from ia_mech.run import Run
from ia_mech.run.labels import choose_judge

NAME = "study"
QUESTION = "How often do user turns follow up, and where in the model is that decided?"
TEMPERATURES = (0.7,)
DRAWN = (1, "all")  # tokens of a sampled turn
RESPONSE_TOKENS, TURN_TOKENS = 512, 40
USUAL = {"queries": 60, "samples": 4, "recipients": RESPONSES, "maps": list(USUAL_MAPS)}
QUICK = {"queries": 10, "samples": 1, "recipients": 1, "maps": [NO_MAPS]}
PROBED = 40  # queries below which probes aren't tried: they need 20 sources of either kind
BAD_INPUT, INTERRUPTED = 2, 130  # exit statuses; 2 also where a stage lacks what it needs
# Folders of results: those whose first tables are shown, and the one that says at which layers.
RATES, FIRST_SAMPLED = "rates-{judge}", "rates-{judge}-sampled-1"
SHOWN = ("locate", "mass", "elicit")
LAYERS = "interchange-mass"
UNWORDED = (
    "Turns may tell a response's content or only its wording (ia-mech reaction tells them apart)."
)
LEFT_OUT_QUICK = "the mass by layer, elicit, maps or probes"


@dataclass(frozen=True)
class Stage:
    """One command of a study.

    Attributes:
        name: what it is called here.
        words: of the command, as ``ia-mech`` takes them.
        result: the folder of its result in the run, if it has one.
        optional: the study goes on where the run doesn't hold what it needs.
        takes: the study's flags that are handed on to it.
    """

    name: str
    words: list[str]
    result: str = ""
    optional: bool = False
    takes: tuple[str, ...] = ("workers", "threads", "ray")

    def run(self, run: Path) -> int:
        """Do it, and print its answer alone, in one line, or all that it says where it fails.
        Returns the exit status."""
        with redirect_stdout(io.StringIO()) as said:
            command, *words = self.words
            status = importlib.import_module(COMMANDS[command][0]).main(words)
        print(said.getvalue() if status else f"{self.name}: {self._answer(Run.open(run))}")
        return status

    def _answer(self, run: Run) -> str:
        if self.result:
            found = read(folder_of(run.path, self.result.format(judge=choose_judge([run], None))))
            return sentences_of(one_line(found.sentence))[0]
        return f"{len(run.turns):,} user turns in {len(run.contexts):,} conversations"


def stages(args: argparse.Namespace) -> list[Stage]:
    run, offline = str(args.out / "run"), ("threads",)  # what commands without a model take
    queries = ["--queries", str(args.queries)]
    sample = ["sample", "--model", args.model, "--dataset", args.dataset]
    sample += ["--limit", str(args.queries)]
    sample += ["--response", "generate", "--responses", str(RESPONSES)]
    sample += ["--response-temperature", "1", "--max-response-tokens", str(RESPONSE_TOKENS)]
    sample += ["--temperatures", *map(str, TEMPERATURES), "--samples", str(args.samples)]
    sample += ["--sampled-tokens", *map(str, DRAWN)]
    sample += ["--max-new-tokens", str(TURN_TOKENS), "--out", run]
    sample += ["--unfinished"] * args.unfinished + ["--skip-unusable"] * args.skip_unusable
    judge = ["judge", "run", run]
    judge += ["--judge", *args.judge] if args.judge else []
    locate = ["locate", run, *queries, "--recipients", str(args.recipients)]
    locate += ["--maps", *(args.maps or [NO_MAPS])]
    found = [
        Stage("sample", sample),
        Stage("judge", judge, takes=()),
        Stage("rates", ["rates", run], RATES, takes=offline),
        Stage("first token", ["rates", run, "--sampled-tokens", "1"], FIRST_SAMPLED, takes=offline),
        Stage("mass", ["mass", run, *queries], "mass", True),
        Stage("locate", locate, "locate"),
    ]
    if not args.quick:
        by_layer = ["interchange", run, "--outcome", "mass", *queries]
        found.append(Stage("mass by layer", by_layer, LAYERS, True))
        found.append(Stage("elicit", ["elicit", run], "elicit"))
    if not args.quick and args.queries >= PROBED:
        for of in ("rate", "latent"):
            probes = ["probes", run, "--target", of]
            found.append(Stage(f"probes {of}", probes, f"probe-{of}-{{judge}}", True, offline))
    for stage in found:
        for name in stage.takes:
            if (value := getattr(args, name)) is not None:
                stage.words.extend([f"--{name}", str(value)])
    return found


# -- what was found --------------------------------------------------------------------------------


def result(out: Path) -> Result:
    """The study's own result, from those of its stages."""
    run = Run.open(out / "run")
    judge = choose_judge([run], None)
    names = [name.format(judge=judge) for name in (RATES, FIRST_SAMPLED, *SHOWN, LAYERS)]
    there = {name: folder_of(run.path, name) for name in names}
    each = {name: read(place) for name, place in there.items() if kind_of(place)}
    rates, located = each[RATES.format(judge=judge)], each["locate"]
    shown = {name: one for name, one in each.items() if name != LAYERS}
    found = [one.estimates.assign(stage=name) for name, one in shown.items()]
    estimates = pd.concat(found, ignore_index=True)
    record = run.labels.record("judgements", judge)
    said = [
        sentences_of(rates.sentence)[0],
        verdict(all_datasets(rates.estimates), fit=highest(record)),
        *(each[name].sentence for name in ("mass", LAYERS, "locate") if name in each),
    ]
    sentences = sentences_of(" ".join(said))
    sentence = " ".join(one for one in sentences if not one.startswith(TOO_FEW))
    of_judge, *last = sentences_of(rates.control)
    control = [
        "Follow-ups are compared with wrong conversations, bits with other responses to the same "
        f"query; {of_judge[:1].lower()}{of_judge[1:]}",
        UNWORDED,
        *last,
    ]
    sites = drawings(located.estimates, run.model["name"])["sites"]
    made = Result(
        name=NAME,
        question=QUESTION,
        sentence=headline(sentence, estimates),
        control=" ".join(control),
        estimates=estimates,
        tables=[one.tables[0] for one in shown.values()],
        figures={"sites": with_style(sites.draw)()},
        notes=list(dict.fromkeys(note for one in shown.values() for note in one.notes)),
        about={"kind": NAME, **about_runs([run], [judge])},
    )
    return marked(made, record)


# -- the command -----------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        prog="ia-mech study",
        usage="%(prog)s MODEL [options]",
        description=(__doc__ or "").strip(),
    )
    what = "an embedded model, a hub id …"
    parser.add_argument("model", type=nonblank, metavar="MODEL", help=what)
    add, switch = partial(flag, parser), partial(parser.add_argument, action="store_true")
    add("--dataset", nonblank, "builtin:study", "of the queries", metavar="DATA")
    add("--queries", whole_from(4), None, "(default: 60)", metavar="N")
    judge = (
        "judge and flags, as for ia-mech judge run: 'llm --model NAME' (default: builtin, English)"
    )
    add("--judge", judge_words, None, judge, metavar="JUDGE")
    turns = "turns per conversation and temperature (default: 4)"
    add("--samples", whole_from(1), None, turns, metavar="N")
    maps = f"of the stage locate: {', '.join(MAPS)}, or {NO_MAPS} (default: {' '.join(USUAL_MAPS)})"
    add("--maps", str, None, maps, nargs="+", choices=(*MAPS, NO_MAPS), metavar="MAP")
    fewer = "of the stage locate, 1 to 4: fewer take less time and give wider intervals "
    add("--recipients", int, None, f"{fewer}(default: 4)", choices=range(1, 5), metavar="N")
    as_they_come = "take the first responses, cut off or not, instead of sampling finished ones"
    switch("--unfinished", help=as_they_come)
    switch("--skip-unusable", help="leave out rows that can't be used, instead of refusing")
    switch(
        "--quick",
        help=f"{QUICK['queries']} queries, one sample, one recipient; without {LEFT_OUT_QUICK}",
    )
    add("--out", path_of, None, "folder of the study (default: cache/study-MODEL)", metavar="DIR")
    switch("--dry-run", help="print the commands, and stop")
    add_workers(parser)
    add_ray(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    tolerant_streams()
    words = sys.argv[1:] if argv is None else argv
    args = with_defaults(build_parser().parse_args(words))
    return run_command(
        lambda: _study(args), lambda: go_on("finished parts are kept", "ia-mech study", words)
    )


def judge_words(given: str) -> list[str]:
    """A judge and its flags, for argparse."""
    try:
        return shlex.split(nonblank(given))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given!r}: {error}") from None


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments with the defaults that depend on others."""
    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = args.out or cache_dir() / f"{NAME}-{Path(args.model).name}"
    return args


def _study(args: argparse.Namespace) -> int | None:
    refuse_missing_model(args.model)  # before torch is loaded, which takes seconds
    from ia_mech.models.load import models_kept

    with models_kept():  # one load for all stages
        return _run_stages(args)


def _run_stages(args: argparse.Namespace) -> int | None:
    if args.dry_run:
        _print_plan(args)
        return None
    if few := too_few(args.queries):
        print(f"note: too few queries: {few}", file=sys.stderr)
    for number, stage in enumerate(todo := stages(args), start=1):
        print(f"\n-- {number} of {len(todo)}: {stage.name}", file=sys.stderr)
        status = stage.run(args.out / "run")
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status and not (stage.optional and status == BAD_INPUT):
            return status
    found = result(args.out)
    write(found, folder_of(args.out / "run", NAME))
    page = importlib.import_module("ia_mech.report.__main__")
    file = args.out / "report.html"
    with redirect_stdout(io.StringIO()):
        status = page.main([str(args.out / "run"), "--out", str(file)])
    print()
    show(found, console(), rest="the page")
    print(f"page: {shell_word(file)}")
    return status


def _print_plan(args: argparse.Namespace) -> None:
    written = f"{RESPONSES} responses to each, which the model writes; the data's own aren't used"
    lines = {"queries": f"{args.queries}; {written}; samples: {args.samples}"}
    for stage in stages(args):
        lines[stage.name] = f"{program()} {shlex.join(stage.words)}"
    if args.quick:
        lines["left out"] = f"{LEFT_OUT_QUICK}, which --quick has no time for"
    elif args.queries < PROBED:
        lines["probes"] = f"left out: they need {PROBED} queries"
    if few := too_few(args.queries):
        lines["too few queries"] = few
    print_plan(lines | {"all": f"goes to {args.out}"})


def study(model: str, **options: Any) -> Result:
    """A whole study of a model, as the command makes it.

    Args:
        model: an embedded model, a hub id or a folder.
        options: the command's flags: ``queries=20``, ``quick=True``, ``maps=["windows"]``, …

    Returns:
        Its result: ``sentence``, ``control``, ``estimates``, ``tables``.

    Raises:
        UserError: a stage can't be done; it has said why.
    """
    from ia_mech.settings import dataset_of

    words = [model]
    for name, value in options.items():
        value = dataset_of(value) if name == "dataset" else value
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
    args = with_defaults(build_parser().read(words))
    if status := _study(args):
        raise UserError(f"the study ended with status {status}", "see what its last stage said")
    return read(folder_of(args.out / "run", NAME))


if __name__ == "__main__":
    sys.exit(main())
