"""How often do user turns follow up, and where in the model is that decided?

One command for a whole study of one model. The model writes several responses to each query. After
each it writes a greedy user turn, turns of which the first token alone is drawn at T = 0.7, and
turns of which all tokens are. A judge labels the turns, and rates compare them with wrong
conversations. The follow-up mass says how much of the difference the first token holds. It is
measured how many bits the turns tell about their response, and which states are enough for these
bits. Prompts and an opening are tried against greedy decoding. Probes are trained. One page reports
it all. Every stage is also a command of its own. If the study is stopped, the same command
continues; a finished study computes nothing again.

The first sentences say how often greedy and sampled turns are follow-ups, and whether sampling
brings out follow-ups that greedy decoding hides (latent follow-ups). Fewer than 50 queries give
counts alone. Whether a state moves the follow-up rate takes --where --samples 16.

Needs: a model. Cost: the embedded model (135M) on two cores takes some two hours, with --quick
ten minutes; --dry-run says which commands it gives, each of which has a --dry-run of its own.

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

from experiments.change import HEADER, OWN, QUERY, RESPONSE, RESPONSES
from experiments.experiment import flag
from experiments.grid import BITS, SHARE
from experiments.grid import SAMPLES as APART
from experiments.locate import (
    LEFT_OUT,
    MAPS,
    USUAL_MAPS,
    Locate,
    Lookup,
    drawings,
    enough_alone,
    follow_up_bits,
    strongest_windows,
)
from experiments.mass import DECODINGS, EVERY, FIRST, GREEDY, RATE, REST, WHOLE, in_parts
from experiments.mass import SHARE as FOLLOWS
from experiments.outcome import IN_ROLE, ONCE_IN_ROLE, parts_of
from experiments.shown import estimates_of, headline, only, print_plan, too_few
from ia_mech.cli import (
    Parser,
    add_ray,
    add_workers,
    nonblank,
    one_line,
    path_of,
    run_command,
    shell_word,
    tolerant_streams,
    whole_from,
)
from ia_mech.data.conversations import open_conversations
from ia_mech.display import console, with_style
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, all_datasets
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.likelihood.carried import CEILING
from ia_mech.models.embedded import cache_dir, refuse_missing_model
from ia_mech.rates.fit import highest, marked
from ia_mech.rates.gate import named
from ia_mech.rates.latent import LEAST, verdict
from ia_mech.results import SHARE as AS_SHARE
from ia_mech.results import (
    Result,
    Table,
    about_runs,
    cell_of,
    folder_of,
    kind_of,
    read,
    sentences_of,
    show,
    table_of,
    write,
)
from ia_mech.run import Run
from ia_mech.run.labels import KEY, choose_judge

NAME = "study"
QUESTION = "How often do user turns follow up, and where in the model is that decided?"
TEMPERATURES = (0.7,)
DRAWN = (1, "all")  # tokens of a sampled turn
RESPONSE_TOKENS, TURN_TOKENS = 512, 40
QUICK = 10  # queries of --quick
PROBED = 40  # queries below which probes aren't tried: they need 20 sources of either kind
BAD_INPUT = 2  # the exit status where a stage lacks what it needs
WHERE = ("interchange", "learned-vector")  # folders of the stages of --where
OPTIONAL = ("mass", "elicit")  # folders of results whose first tables are shown, if they are there
BY_LAYER = "interchange-mass"
LAYERS = (BY_LAYER, *WHERE)  # results that say at which layers, in the order of the sentence

OPTIONS = {"level": 0.95, "resamples": 2000, "seed": 0}  # of the study's own estimates
UNWORDED = "Turns may tell a response's content or only its wording (--wording tells them apart)."
NO_VERDICT = f"counts alone, not whether follow-ups are latent: that takes {LEAST} queries"
LEFT_OUT_QUICK = "the mass by layer, elicit, maps or probes"


@dataclass(frozen=True)
class Stage:
    """One command of a study: the ``main`` of a module. A study goes on where the run doesn't hold
    what an optional one needs. ``result`` is the folder of its result in the run, if it has one."""

    name: str
    module: str
    words: list[str]
    optional: bool = False
    result: str = ""

    def run(self, run: Path) -> int:
        """Do it, and print its answer alone, in one line, or all that it says where it fails.
        Returns the exit status."""
        with redirect_stdout(io.StringIO()) as said:
            status = importlib.import_module(self.module).main(self.words)
        print(said.getvalue() if status else f"{self.name}: {self._answer(Run.open(run))}")
        return status

    def _answer(self, run: Run) -> str:
        if self.result:
            found = read(folder_of(run.path, self.result.format(judge=choose_judge([run], None))))
            return sentences_of(one_line(found.sentence))[0]
        if run.labels.judges:
            return f"{named(choose_judge([run], None))} has labelled {len(run.turns):,} user turns"
        return f"{len(run.turns):,} user turns in {len(run.contexts):,} conversations"


def stages(args: argparse.Namespace) -> list[Stage]:
    run = str(args.out / "run")
    sample = ["--model", args.model, "--dataset", args.dataset, "--limit", str(args.queries)]
    sample += ["--response", "generate", "--responses", str(RESPONSES)]
    sample += ["--response-temperature", "1", "--max-response-tokens", str(RESPONSE_TOKENS)]
    sample += ["--temperatures", *map(str, TEMPERATURES), "--samples", str(args.samples)]
    sample += ["--drawn-tokens", *map(str, DRAWN)]
    sample += ["--max-new-tokens", str(TURN_TOKENS), "--out", run]
    sample += ["--unfinished"] * args.unfinished + ["--skip-unusable"] * args.skip_unusable
    locate = ["--queries", str(args.queries), "--recipients", str(args.recipients)]
    locate += ["--maps", *args.maps]
    found = [
        Stage("sample", "ia_mech.collect.command", sample),
        Stage("judge", "ia_mech.judge.__main__", ["run", run, *shlex.split(args.judge or "")]),
        Stage("rates", "ia_mech.rates.__main__", [run], result="rates-{judge}"),
        Stage("mass", "experiments.mass", [run, "--queries", str(args.queries)], True, "mass"),
        Stage("locate", "experiments.locate", [run, *locate], result="locate"),
    ]
    if not args.quick:
        words = [run, "--outcome", "mass", "--queries", str(args.queries)]
        found.append(Stage("mass by layer", "experiments.interchange", words, True, BY_LAYER))
        found.append(Stage("elicit", "experiments.elicit", [run], result="elicit"))
    if args.wording:
        found.append(Stage("reaction", "experiments.reaction", [run], True, "reaction"))
    if not args.quick and args.queries >= PROBED:
        for target in ("rate", "latent"):
            words, result = [run, "--target", target], f"probe-{target}-{{judge}}"
            found.append(Stage(f"probes {target}", "probes.train", words, True, result))
    if args.where:
        samples, quick = [run, "--samples", str(args.samples)], [run, "--quick"]
        for place, words in zip(WHERE, (samples, quick), strict=True):
            module = f"experiments.{place.replace('-', '_')}"
            found.append(Stage(place.replace("-", " "), module, words, True, place))
    modelless = ("judge", "rates", "probes")
    for name, lacking in (("workers", modelless), ("ray", modelless), ("threads", ("judge",))):
        if (value := getattr(args, name)) is not None:
            for stage in found:
                if stage.name.split()[0] not in lacking:
                    stage.words.extend([f"--{name}", str(value)])
    return found


# -- what was found --------------------------------------------------------------------------------


def result(out: Path) -> Result:
    """The study's own result, from those of its stages."""
    run = Run.open(out / "run")
    located = read(folder_of(run.path, "locate"))
    judge = choose_judge([run], None)
    rows = pd.read_parquet(folder_of(run.path, "locate") / "rows.parquet")
    verdicts = run.labels.judgements(judge, [*KEY, "follow_up"]).dropna()
    verdicts = verdicts[run.drawn(verdicts)].astype({"context_id": object, "follow_up": float})
    of_turn = ["context_id", "temperature", "sample"]
    verdicts = verdicts.groupby(of_turn)["follow_up"].mean().reset_index()
    of_follow_ups = estimates_of(
        follow_up_bits(rows, verdicts, OPTIONS), Locate.columns, OPTIONS["level"]
    )
    drawn = drawn_rates(run, judge)
    parts = {"locate": located.estimates}
    parts[NAME] = pd.concat([drawn, of_follow_ups], ignore_index=True)
    there = [one for one in OPTIONAL if kind_of(folder_of(run.path, one))]
    more = {one: read(folder_of(run.path, one)) for one in there}
    parts |= {one: each.estimates for one, each in more.items()}
    found = pd.concat([rows.assign(stage=name) for name, rows in parts.items()], ignore_index=True)
    told = Lookup(located.estimates)

    windows = strongest_windows(located.estimates, run.model["layers"], OPTIONS["level"])
    rates = read(folder_of(run.path, f"rates-{judge}"))
    record = run.labels.record("judgements", judge)
    places = [folder_of(run.path, name) for name in LAYERS]
    sentence = [
        how_often(drawn, run.model["name"]),
        verdict(all_datasets(rates.estimates), fit=highest(record)),
        first_token(more["mass"]) if "mass" in more else "",
        *[read(place).sentence for place in places if kind_of(place)],
        f"Sampled turns tell {told(BITS, OWN)} of {CEILING:.2f} bits about which response they "
        f"followed. {enough_alone(located.estimates)}{windows and f'; {windows}'}.",
    ]
    wording = folder_of(run.path, "reaction")
    of_judge, *last = sentences_of(rates.control)
    control = [
        "Follow-ups are compared with wrong conversations, bits with other responses to the same "
        f"query; {of_judge[:1].lower()}{of_judge[1:]}",
        read(wording).control if kind_of(wording) else UNWORDED,
        *last,
    ]
    sites = drawings(located.estimates, run.model["name"])["sites"]
    made = Result(
        name=NAME,
        question=QUESTION,
        sentence=headline(" ".join(filter(None, sentence)), found),
        control=" ".join(control),
        estimates=found,
        tables=[
            _drawn_table(drawn),
            _bits_table(located.estimates),
            *(table for each in more.values() for table in each.tables[:1]),
        ],
        figures={"sites": with_style(sites.draw)()},
        notes=list(dict.fromkeys(note for one in (located, *more.values()) for note in one.notes)),
        about={"kind": NAME, **about_runs([run], [judge])},
    )
    return marked(made, record)


def drawn_rates(run: Run, judge: str) -> pd.DataFrame:
    """Estimates of follow-ups and their two parts, by how many tokens of a turn were drawn."""
    turns = run.labelled(judge, texts=False)
    turns = turns.join(parts_of(turns, FOLLOW_UP)[[FOLLOWS, IN_ROLE]])
    counts = 0, 1, run.settings["max_new_tokens"]
    found: list[TidyEstimate] = []
    for drawn, decoding in zip(counts, DECODINGS, strict=True):
        own = turns[turns["drawn_tokens"] == drawn]
        group = Group(own["source"].to_numpy(), OPTIONS, {"dataset": ALL, "decoding": decoding})
        found += in_parts(group, own[FOLLOWS], own[IN_ROLE])
    return estimates_of(found, {"dataset": "str", "decoding": "str"}, OPTIONS["level"])


def how_often(drawn: pd.DataFrame, model: str) -> str:
    """How many turns are follow-ups, and in role, by how many of their tokens were drawn; of fewer
    than :data:`LEAST` queries in counts."""
    said, of = [], {GREEDY: f"greedy turns of {model}", FIRST: "turns with the first token drawn"}
    of[WHOLE] = "turns with all tokens drawn"
    for decoding in DECODINGS:
        rows = drawn[drawn["decoding"] == decoding].set_index("quantity")
        follow_ups, role = rows.loc[RATE], rows.loc[IN_ROLE]
        turns = of[decoding]
        if follow_ups["sources"] < LEAST:
            counts = [f"{row['value'] * row['rows']:.0f}" for row in (follow_ups, role)]
            said.append(f"{counts[0]} of {follow_ups['rows']} {turns} ({counts[1]} in role)")
        else:
            once = f", of these {cell_of(rows.loc[ONCE_IN_ROLE])}" * (ONCE_IN_ROLE in rows.index)
            said.append(f"{cell_of(follow_ups)} of {turns} (in role {cell_of(role)}{once})")
    return f"Follow-ups are {said[0]}, {said[1]} and {said[2]}."


def first_token(mass: Result) -> str:
    """What the first token holds. Of fewer than :data:`LEAST` queries, without intervals."""
    rows = all_datasets(mass.estimates[mass.estimates["term"] == EVERY])
    of = {one: only(rows, one, decoding=FIRST).iloc[0] for one in (RATE, REST)}
    if of[RATE]["sources"] >= LEAST:
        return mass.sentence
    low = of[RATE]["value"]
    return f"The follow-up mass of first tokens is {low:.2f} to {low + of[REST]['value']:.2f}."


def _drawn_table(drawn: pd.DataFrame) -> Table:
    return table_of(
        f"user turns by how much of them is drawn at T = {TEMPERATURES[0]:g}",
        drawn,
        {name: (name, 2) for name in (RATE, IN_ROLE, ONCE_IN_ROLE)},
        index=("decoding",),
        rows="turns",
        legend="In role: neither repeats the conversation nor speaks as the assistant. Once in "
        "role: follow-ups by turns in role.",
    )


def _bits_table(located: pd.DataFrame) -> Table:
    """What greedy and sampled turns tell, and through which part of the context."""
    shown = all_datasets(located[located["term"].isin([OWN, RESPONSE, HEADER, QUERY])])
    return table_of(
        f"bits that turns tell about the response that they followed (at most {CEILING:.2f})",
        shown[shown["temperature"].isna() | (shown["temperature"] == 0)],
        {
            BITS: ("bits", 2),
            SHARE: ("enough for (share)", AS_SHARE),
            LEFT_OUT: ("lost without (bits)", 2),
        },
        index=("temperature", "term"),
        rows="queries",
        legend=f"{OWN}: all of them; other lines: those that keys and values of this part of the "
        "context are enough for. Enough for (sufficiency): these bits as a share of all. Lost "
        "without (necessity): bits that go if only this part is another response's. The query is "
        "the control: it is the same for all responses.",
    )


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
    judge = "and its flags, as of ia-mech judge run: 'llm --model NAME' (default: builtin, English)"
    add("--judge", judge_words, None, judge, metavar="JUDGE")
    turns = "turns per conversation and temperature (default: 4)"
    add("--samples", whole_from(1), None, turns, metavar="N")
    maps = f"of the stage locate: {', '.join(MAPS)} (default: {' '.join(USUAL_MAPS)})"
    add("--maps", str, None, maps, nargs="*", choices=MAPS, metavar="MAP")
    fewer = "of the stage locate, 1 to 4: fewer take less time and give wider intervals "
    add("--recipients", int, None, f"{fewer}(default: 4)", choices=range(1, 5), metavar="N")
    as_they_come = "take responses as they come, cut off or not, instead of drawing finished ones"
    switch("--unfinished", help=as_they_come)
    switch("--skip-unusable", help="leave out rows that can't be used, instead of refusing")
    wordings = "also how much turns tell about wordings of one response, written by the model"
    switch("--wording", help=wordings)
    states = "also whether follow-ups travel with a state, and after which layers a vector makes "
    switch("--where", help=f"{states}turns react to the response (hours)")
    switch("--quick", help=f"{QUICK} queries, one sample, one recipient; without {LEFT_OUT_QUICK}")
    add("--out", path_of, None, "where all of it goes (default: cache/study-MODEL)", metavar="DIR")
    switch("--dry-run", help="say what is done, and stop")
    add_workers(parser)
    add_ray(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    tolerant_streams()
    args = with_defaults(build_parser().parse_args(argv))
    kept = "what was computed is kept; the same command goes on from there"
    return run_command(lambda: _study(args), lambda: kept)


def judge_words(given: str) -> str:
    """A judge and its flags, for argparse."""
    try:
        return shlex.join(["--judge", *shlex.split(nonblank(given))])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given!r}: {error}") from None


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments with the defaults that depend on others."""
    args.queries = args.queries or (QUICK if args.quick else 60)
    args.samples = args.samples or (1 if args.quick else 4)
    args.recipients = args.recipients or (1 if args.quick else 4)
    if args.maps is None:
        args.maps = [] if args.quick else list(USUAL_MAPS)
    args.out = args.out or cache_dir() / f"{NAME}-{Path(args.model).name}"
    return args


def _study(args: argparse.Namespace) -> int | None:
    if args.where and args.samples < APART:
        more = "leave --quick out and " * args.quick + f"give --samples {APART}"
        raise UserError(
            f"--where takes {APART} turns a conversation; there are {args.samples}", more
        )
    refuse_missing_model(args.model)  # before torch is loaded, which takes seconds
    from ia_mech.models.load import models_kept

    with models_kept():  # one load for all stages
        return _run_stages(args)


def usable_queries(stage: Stage, out: Path) -> int:
    """How many queries the first stage will use, those that the model's template can't show left
    out or refused as there."""
    from ia_mech.collect.command import build_parser as of_sample
    from ia_mech.collect.command import settings_of
    from ia_mech.collect.plan import Plan

    plan = Plan(settings_of(of_sample().parse_args(stage.words)), out)
    for line in plan.skipped:
        print(f"note: skipped, {one_line(line)}", file=sys.stderr)
    return plan.data.rows


def _run_stages(args: argparse.Namespace) -> int | None:
    begun = (args.out / "run" / "run.json").is_file()
    if not begun:  # what can't be used is known before anything is planned by it
        usable = {"limit": args.queries, "skip_unusable": args.skip_unusable}
        queries = sum(1 for _ in open_conversations(args.dataset, **usable))
        args.queries = min(args.queries, queries)
    if args.dry_run:
        if not begun:
            args.queries = usable_queries(stages(args)[0], args.out / "run")
        _print_plan(args)
        return None
    if few := too_few(args.queries):
        print(f"note: too few queries: {few}", file=sys.stderr)
    if args.queries < LEAST:
        print(f"note: {NO_VERDICT}", file=sys.stderr)
    for number, stage in enumerate(todo := stages(args), start=1):
        print(f"\n-- {number} of {len(todo)}: {stage.name}", file=sys.stderr)
        status = stage.run(args.out / "run")
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
        lines[stage.name] = f"{stage.module} {shlex.join(stage.words)}"
    if args.quick:
        lines["left out"] = f"{LEFT_OUT_QUICK}, which --quick has no time for"
    elif args.queries < PROBED:
        lines["probes"] = f"left out: they need {PROBED} queries"
    if few := too_few(args.queries):
        lines["too few queries"] = few
    if args.queries < LEAST:
        lines["latent follow-ups"] = NO_VERDICT
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
    from ia_mech.settings import dataset_of, parameters_named

    parser, words = build_parser(), [model]
    known = {one.dest: None if one.nargs == 0 else one.type or str for one in parser._actions[1:]}
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}")
    for name, value in options.items():
        value = dataset_of(value) if name == "dataset" else value
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
    with parameters_named(known, "ia-mech study"):
        args = with_defaults(parser.read(words))
        status = _study(args)
    if status:
        raise UserError(f"the study ended with status {status}", "see what its last stage said")
    return read(folder_of(args.out / "run", NAME))


if __name__ == "__main__":
    sys.exit(main())
