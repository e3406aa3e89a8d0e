"""States of any token of a run's contexts, and of the turns after them.

A run keeps the residual stream at the user header (--positions). This command computes it anywhere
else, from the tokens' ids, in one pass over each context and its turn. So the states of tokens that
were generated can be had, too, and what each block's attention and MLP add.

    ia-mech capture cache/RUN --tokens response:-1 --layers 8 15 22
    ia-mech capture cache/RUN --tokens turn:0..3 header:-1 --layers 15 --component attn mlp
    ia-mech capture cache/RUN --tokens turn:0 --layers 15 --temperature 1 --samples 2
    ia-mech capture cache/RUN --tokens query:0..9 --layers 15 --dry-run

Tokens: query, response, header, context (all that the model reads) or turn, then a number from 0,
or from -1 for the last token; FIRST..LAST includes both. Where a part is too short, the state is
NaN. Turns are the greedy ones, or those at --temperature.
Components: resid is the residual stream behind a block. attn and mlp are what its attention (full
or recurrent) and its MLP add to it, after the norm behind them where the block has one. So resid of
the layer before, attn and mlp sum to resid.
In Python: run.residuals(15, tokens=["turn:0", "turn:1"], component="attn"), of sampled turns with
turns=, some rows of run.generations.
What was captured before is not computed again; an interrupted command goes on when it is repeated.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ia_mech.cli import Parser, go_on, run_command, run_folder, shell_word, whole_from
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.labels import KEY
from ia_mech.run.tokens import COMPONENTS, TURN, of_turns, place_of, token_names

if TYPE_CHECKING:
    from ia_mech.chat.format import ChatFormat
    from ia_mech.display import Progress
    from ia_mech.models.load import Subject


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ia-mech capture", description=__doc__)
    parser.add_argument("run", type=run_folder, metavar="RUN", help="what ia-mech sample wrote")
    parser.add_argument("--tokens", nargs="+", required=True, metavar="TOKENS", help="see above")
    parser.add_argument(
        "--layers", nargs="+", required=True, type=whole_from(0), help="0 is the embeddings"
    )
    parser.add_argument(
        "--component", nargs="+", choices=COMPONENTS, default=["resid"], help="(default: resid)"
    )
    parser.add_argument(
        "--temperature",
        nargs="+",
        type=temperature,
        default=[0.0],
        metavar="T",
        help="of the turns, or all (default: 0, the greedy ones)",
    )
    parser.add_argument(
        "--samples", type=whole_from(1), metavar="N", help="the first N of each temperature"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be written, and stop"
    )
    return parser


def temperature(text: str) -> float | None:
    """A temperature; None for all."""
    return None if text == "all" else float(text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(words)

    def body() -> None:
        run = Run.open(args.run)
        wanted = Wanted(
            run, args.tokens, args.layers, args.component, args.temperature, args.samples
        )
        print(wanted.plan())
        if not args.dry_run:
            from ia_mech.display import Bar
            from ia_mech.engine.installed import install
            from ia_mech.models.load import load, recall

            subject = load(recall(run.settings, run.model["weights_hash"]))
            install(subject.model)
            capture(wanted, subject, Bar())
            print(f"written to {shell_word(run.path / layout.STATES)}")

    return run_command(body, lambda: go_on("whole parts are kept", "ia-mech capture", words))


class Wanted:
    """What is to be captured of a run.

    Args:
        temperatures: of the turns whose tokens are wanted; None among them stands for all.
        samples: how many turns of each temperature; all if not given.

    Raises:
        UserError: no such token, layer, component or turn, or a run whose turns an intervention
            wrote.
    """

    def __init__(
        self,
        run: Run,
        tokens: list[str],
        layers: list[int],
        components: list[str],
        temperatures: Sequence[float | None] = (0.0,),
        samples: int | None = None,
    ) -> None:
        self.run, self.tokens = run, token_names(tokens)
        self.layers = sorted({*run.layers_of(layers)})
        self.components = [one for one in COMPONENTS if one in components]
        if self.components != ["resid"] and 0 in self.layers:
            raise UserError(
                "layer 0 is the embeddings: it has the component resid alone",
                "name layers from 1 up for attn and mlp",
            )
        if run.settings["intervention"] is not None:
            raise UserError(
                f"{run.path} was sampled under --intervention {run.settings['intervention']}",
                "give a run that was sampled without one",
            )
        turns = run.generations[[*KEY, "token_ids"]]
        if not of_turns(self.tokens):
            temperatures, samples = (0.0,), None  # one pass over each context
            turns = turns.assign(token_ids=[()] * len(turns))
        there = [float(one) for one in turns["temperature"].unique()]
        chosen = sorted({one for one in temperatures if one is not None})
        chosen = there if None in temperatures else chosen
        if lacking := [f"{one:g}" for one in chosen if one not in there]:
            raise UserError(
                f"no turn was sampled at temperature {', '.join(lacking)}",
                f"give some of {' '.join(f'{one:g}' for one in there)}, or all",
            )
        some = turns["temperature"].isin(chosen)
        if samples is not None:
            some &= turns["sample"] < samples
        contexts = run.contexts.set_index("context_id")["token_ids"]
        self.turns = turns[some].reset_index(drop=True)
        self.sequences = self.turns["context_id"].map(contexts).map(list)
        self.sequences += self.turns["token_ids"].map(list)
        text = json.dumps([self.tokens, self.layers, self.components, chosen, samples])
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:8]

    def plan(self) -> str:
        """What is computed and written, in a line."""
        model, count = self.run.model, len(self.turns)
        size = 4 if model["dtype"] == "float32" else 2
        each = len(self.tokens) * len(self.layers) * len(self.components)
        total = count * each * model["d_model"] * size
        return (
            f"{count} {'turns' if of_turns(self.tokens) else 'contexts'}, "
            f"{self.sequences.map(len).sum():,} tokens to compute (as long as prefilling them), "
            f"{each} states of each, {total / 2**20:,.1f} MiB"
        )


def capture(wanted: Wanted, subject: "Subject", progress: "Progress") -> None:
    """Compute and write those parts of what is wanted that aren't there.

    Raises:
        UserError: the model has other weights now, or can't give a component.
    """
    from ia_mech.collect.plan import build_chat
    from ia_mech.engine.components import states
    from ia_mech.settings import Settings

    run = wanted.run
    if subject.weights_hash != run.model["weights_hash"]:
        raise UserError(
            f"{subject.spec.name} has the weights {subject.weights_hash} now, {run.path} those of "
            f"{run.model['weights_hash']}",
            "restore the model, or sample the run again",
        )
    chat = build_chat(Settings.read(run.settings), subject.files)
    parts, begin = {}, 0
    for part in run.parts("contexts"):
        if part["contexts"]:
            contexts = run.contexts.iloc[begin : begin + part["contexts"]].set_index("context_id")
            parts[f"{wanted.digest}-{part['name']}"] = contexts
            begin += len(contexts)
    with RunWriter(run.path, {key: run.record[key] for key in run.record if key != "format"}) as to:
        to.start_session({})
        counts = {name: len(contexts) for name, contexts in parts.items()}
        for problem in to.find_damage(layout.STATES, counts):
            progress.say(f"{problem}; it is computed again")
        progress.start("states", int(wanted.sequences.map(len).sum()), unit="token")
        for name, contexts in parts.items():
            turns = wanted.turns[wanted.turns["context_id"].isin(contexts.index)]
            ids = wanted.sequences[turns.index].tolist()
            if not to.claim(layout.STATES, name):
                progress.advance(sum(map(len, ids)))
                continue
            spans = {key: _spans(chat, key, row) for key, row in contexts.iterrows()}
            at = []
            for key, whole in zip(turns["context_id"], ids, strict=True):
                own = spans[key] | {TURN: range(len(spans[key]["context"]), len(whole))}
                at.append([place_of(token, own) for token in wanted.tokens])
            found = states(
                subject.model, ids, at, wanted.layers, wanted.components, progress.advance
            )
            tensors = {
                layout.state_name(component, layer): whole[:, number].contiguous()
                for component, whole in found.items()
                for number, layer in enumerate(wanted.layers)
            }
            keys = turns[list(KEY)].values.tolist()
            to.add_states(name, tensors, len(contexts), keys, wanted.tokens)
        progress.stop()


def _spans(chat: "ChatFormat", name: str, row: Any) -> dict[str, range]:
    """The indices of each part of a context."""
    context = chat.context(list(row["messages"]))
    if context.ids != list(row["token_ids"]):
        raise UserError(
            f"the chat template gives context {name!r} other tokens than the run has",
            "use the tokenizer that the run was sampled with",
        )
    header = [at for name, at in context.positions.items() if name.startswith("header_")]
    at = [one for one in header if one is not None]
    return {
        "query": context.query,
        "response": context.response,
        "header": range(min(at), max(at) + 1),
        "context": range(len(context.ids)),
    }


if __name__ == "__main__":
    sys.exit(main())
