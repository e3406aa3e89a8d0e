"""Make the published tables of a study from its run and its experiments' results.

    python docs/results/data/make.py FOLDER OUT
    python docs/results/data/make.py sampled RUN OUT
    python docs/results/data/make.py figures

FOLDER holds run/ (with results of locate and of ``rates --by correct``) and bands/ (of locate
--maps bands blocks); a table without its folder is left out.
``verdicts.py`` then judges the turns. RUN of ``sampled`` was made with ``--sampled-tokens 1 3
all``; it may have labels of the annotators ``reader`` and ``second``, and results of ``mass`` and
of ``interchange`` and ``locate`` with ``--outcome mass``. Labels of first tokens, tables of
vectors, and the sites and siblings of Qwen, were added by hand.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from experiments.change import OWN
from experiments.control import ARMS, COVERED
from experiments.locate import ALL_LAYERS, ALL_WRITTEN, PART_SITES
from experiments.outcome import (
    IN_ROLE,
    of_first_tokens,
    of_later_tokens,
    query_bits_of,
    with_own_scores,
)
from experiments.shown import Bars, Lines
from ia_mech import Run

TURN = ["context_id", "temperature", "sample"]
DEPTHS = {"SmolLM2-135M": 30, "Qwen2.5-Coder-1.5B": 28}


def contexts(run: Run, folder: Path) -> pd.DataFrame:
    """Query and response of every context, and whether the response was verified as right."""
    found = run.contexts
    said = {
        role: [[m["content"] for m in one if m["role"] == role][-1] for one in found["messages"]]
        for role in ("user", "assistant")
    }
    table = pd.DataFrame(
        {
            "context": found["context_id"].astype(str),
            "query": found["source_id"].astype(str),
            "dataset": found["dataset"].astype(str),
            "query_text": said["user"],
            "response": said["assistant"],
            "response_tokens": found["response_tokens"].astype(int),
        }
    )
    verified = folder / "run/results/rates-rules-by-correct/responses.parquet"
    if verified.is_file():
        right = pd.read_parquet(verified).set_index("context_id")["correct"]
        table["right"] = table["context"].map(right).astype("float32")
    return table


def turns(run: Run) -> pd.DataFrame:
    """Every turn; ``verdicts.py`` adds the judge's verdicts."""
    return run.generations[[*TURN, "text"]].rename(columns={"context_id": "context"})


def bits(folder: Path) -> pd.DataFrame:
    """Bits and hits of each query by site, layer and temperature.

    ``bits`` and ``hits`` are of turns from their second token on (of all tokens, where the model
    wrote them after hybrids), ``whole_bits`` and ``whole_hits`` of all tokens, ``first_bits`` of
    the first one.
    """
    rows = with_own_scores(pd.read_parquet(folder / "rows.parquet"))
    found = []
    for (site, layer, t), one in rows.groupby(["site", "layer", "temperature"]):
        written = site in ALL_WRITTEN
        scored = [one if written else of_later_tokens(one), one, of_first_tokens(one)]
        later, whole, first = (query_bits_of(each, seed=0) for each in scored)
        if later is not None:
            table = {"query": later.queries, "bits": later.bits, "hits": later.hits}
            table |= {"whole_bits": whole.bits, "whole_hits": whole.hits, "first_bits": first.bits}
            found.append(pd.DataFrame(table).assign(site=site, layer=layer, temperature=t))
    return pd.concat(found, ignore_index=True)


def sampled(run: Run, folder: Path) -> dict[str, pd.DataFrame]:
    """Turns by how many of their first tokens were sampled, first tokens, and moved masses."""
    key, labels = [*TURN, "sampled_tokens"], run.labels
    judged = run.labelled("builtin")[[*key, "text", "category", "follow_up_probability"]]
    own = judged.rename(columns={"category": "judged", "follow_up_probability": "probability"})
    tables = {"contexts": contexts(run, folder)}
    if labels.annotators:
        tables["wrong"] = labels.decoys("reader", "annotations")[[*key, "shown"]]
    for name in labels.annotators:
        names = {"category": "category" if name == "reader" else f"{name}_reading"}
        of_own = labels.annotations(name)[[*key, "category"]].rename(columns=names)
        of_wrong = labels.decoys(name, "annotations")[[*key, "shown", "category"]]
        own = own.merge(of_own, "left", key)
        of_wrong = of_wrong.rename(columns=names)
        tables["wrong"] = tables["wrong"].merge(of_wrong, "left", [*key, "shown"])
    tables["turns"] = own
    results = run.path / "results"
    if (first := results / "mass/first_tokens.parquet").is_file():
        columns = ["context_id", "opening", "p", "greedy", "category", "text"]
        tables["first_tokens"] = pd.read_parquet(first)[columns]
    for name, of, by in (
        ("layers", "interchange-mass", "layer"),
        ("sites", "locate-mass", "term"),
        ("siblings", "locate-mass-siblings", "term"),
    ):
        if (moved := results / of / "rows.parquet").is_file():
            columns = ["", f"{IN_ROLE} ", f"{COVERED} ", "own ", "query "]
            columns += ["donor "] * (name == "siblings")
            columns = [f"{which}{arm}" for which in columns for arm in ARMS]
            tables[name] = pd.read_parquet(moved)[["source", by, "unchanged", *columns]]
    renamed = {"context_id": "context", "sampled_tokens": "sampled"}
    return {name: one.rename(columns=renamed) for name, one in tables.items()}


def main(folder: Path, out: Path) -> None:
    """Write all tables that the folder has the results for."""
    run = Run.open(folder / "run")
    tables = {"contexts": contexts(run, folder), "turns": turns(run)}
    for name, results in {"bits": "run/results/locate", "parts": "bands"}.items():
        if (folder / results / "rows.parquet").is_file():
            tables[name] = bits(folder / results)
    if "parts" in tables:
        every = tables["parts"]
        tables["parts"] = every[every["site"].isin([ALL_LAYERS, *PART_SITES])]
    write(tables, out)


def write(tables: dict[str, pd.DataFrame], out: Path) -> None:
    """A Parquet file of each table, its numbers in single precision."""
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        for column in table.columns[table.dtypes.astype(str).isin(["category", "string", "str"])]:
            table[column] = table[column].astype(object)
        numbers = table.columns[table.dtypes == np.float64]
        keep = table.astype(dict.fromkeys(numbers, np.float32))
        keep.to_parquet(out / f"{name}.parquet", compression="zstd", compression_level=19)


def estimates(models: dict[str, Path], names: dict[str, tuple[str, int]]) -> pd.DataFrame:
    """Mean bits at T = 0.7 by site, a row per model and name, with intervals over queries."""
    rows = []
    for model, folder in models.items():
        bits = pd.read_parquet(folder / "bits.parquet")
        bits = bits[bits["temperature"].round(2) == 0.7]
        for name, (site, layer) in names.items():
            of_query = bits.loc[(bits["site"] == site) & (bits["layer"] == layer), "bits"]
            reach = student_t.ppf(0.975, len(of_query) - 1) * of_query.sem()
            mean = of_query.mean()
            rows.append({"term": name, "dataset": model, "value": mean})
            middle = (layer + min(layer + 3, DEPTHS[model])) / 2  # of up to four layers
            rows[-1] |= {"low": mean - reach, "high": mean + reach, "layer": middle}
    return pd.DataFrame(rows)


def figures(models: dict[str, Path], out: Path) -> None:
    """Sites, and windows of layers, of both models."""
    parts = {"everything": OWN, "response and header": "response and header"}
    parts |= {"the response": "response", "the header": "header", "the query (control)": "query"}
    sites = {name: (f"written: {part}", -1) for name, part in parts.items()}
    what = "bits a turn at T = 0.7 tells about its response"
    bars = Bars(
        "newly written turns, with only this from their response", what, estimates(models, sites)
    )
    windows = {f"{at}": ("response, layers", at) for at in range(1, 30, 4)}
    rows = estimates(models, windows).dropna()
    words = "keys and values of the response, four layers alone", "middle layer", what
    lines = Lines(*words, rows, across="layer", by="dataset")
    made = {"compare-models": bars, "compare-layers": lines}
    for name, drawing in made.items():
        drawing.draw().savefig(out / f"{name}.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    if sys.argv[1] == "figures":
        data = Path(__file__).parent
        both = {
            "SmolLM2-135M": "smollm2-135m-instruct",
            "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b-instruct",
        }
        figures({name: data / folder for name, folder in both.items()}, data.parents[1] / "figures")
    elif sys.argv[1] == "sampled":
        given = Run.open(sys.argv[2])
        write(sampled(given, given.path.parent), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
