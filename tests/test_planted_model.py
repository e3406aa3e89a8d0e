"""A language model with planted logits, through the whole chain: every estimate has a closed form.

Its next token depends on the last one's class alone (class = id mod 8), so each distribution is a
row of a table. Attention adds nothing; one block adds a known vector, so that the logit lens has
one table before it and another one after it. What greedy opens with is unlikely before.
"""

import numpy as np
import pandas as pd
import pytest
import scored
import torch
from conftest import Silent
from runs import sampled
from scipy.special import log_softmax
from test_temperature_sweep import judged, sweep_of
from tiny import blank

from experiments.outcome import GREEDY
from ia_mech.engine.workers import Team
from ia_mech.lens import save_lens
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import Run
from ia_mech.settings import Settings

CLASSES, WIDTH, BLOCK = 8, 32, 2  # the block that adds something is the second
LIKELIEST = 60  # after a token of class c, id 60 + c
KEY = ["context_id", "temperature", "sampled_tokens", "sample"]
SAMPLES = 6
TEMPERATURES = (0.5, 1.0, 1.75)


class Planted:
    """The model, and its tables ``[classes, vocab]`` of logits before and after the block."""

    def __init__(self, tiny: Subject) -> None:
        model = blank(tiny.model)
        vocab = model.config.vocab_size
        rng = np.random.default_rng(3)
        first, added = 0.25 * rng.standard_normal((2, CLASSES, vocab))
        each = np.arange(CLASSES)
        first[each, LIKELIEST + each], added[each, LIKELIEST + each] = -2.0, 3.5
        with torch.no_grad():
            ids = torch.arange(vocab)
            model.model.embed_tokens.weight[ids, ids % CLASSES] = 1.0
            mlp = model.model.layers[BLOCK - 1].mlp
            mlp.gate_proj.weight[each, each] = 1.0
            mlp.up_proj.weight[each, each] = 1.0
            normed = np.sqrt(WIDTH)  # of a unit vector
            gated = normed / (1 + np.exp(-normed)) * normed
            mlp.down_proj.weight[CLASSES + each, each] = 1 / gated
            model.lm_head.weight[:, :CLASSES] = torch.from_numpy(first.T)
            model.lm_head.weight[:, CLASSES : 2 * CLASSES] = torch.from_numpy(added.T)
        self.subject = Subject(ModelSpec("planted"), model, tiny.tokenizer, weights_hash(model))
        self.before = np.sqrt(WIDTH) * first
        self.after = np.sqrt(WIDTH / 2) * (first + added)

    def log_p(self, before: int, temperature: float = 1.0) -> np.ndarray:
        """``[vocab]`` of the next token after a token, in nats."""
        return log_softmax(self.after[before % CLASSES] / temperature)


@pytest.fixture(scope="module")
def planted(tiny_subject) -> Planted:
    return Planted(tiny_subject)


@pytest.fixture(scope="module")
def run(planted, tmp_path_factory) -> Run:
    """Sampled from the planted model, with the lens where the command looks for it."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(folder))
        assert (
            save_lens(Team(planted.subject), planted.subject.weights_hash, list(range(3, 30)))
            is None
        )
        data = scored.dataset(folder / "chats.jsonl")
        settings = Settings(
            dataset=data, limit=None, temperatures=(0.5, 1.0), samples=SAMPLES, max_new_tokens=5
        )
        yield judged(sampled(settings, planted.subject, folder / "run", Silent()))


@pytest.fixture(scope="module")
def measured(run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The sampled turns with where greedy leaves them, and the estimates of all datasets."""
    _, turns, rows = sweep_of(run)
    return turns, rows[rows["dataset"] == "(all)"]


@pytest.fixture(scope="module")
def found(measured) -> pd.DataFrame:
    return measured[1]


@pytest.fixture(scope="module")
def header(run) -> int:
    """The last token of the user header, which all first tokens follow."""
    return int(run.contexts["token_ids"].iloc[0][-1])


def value(found: pd.DataFrame, quantity: str, **names) -> float:
    rows = found[found["quantity"] == quantity]
    for name, wanted in names.items():
        rows = rows[rows[name] == wanted]
    assert len(rows) == 1, rows
    return rows["value"].item()


@pytest.mark.parametrize("t", TEMPERATURES)
def test_the_first_token(t, found, planted, header, run):
    log_p = planted.log_p(header, t)
    p = np.exp(log_p)
    entropy = -(p * log_p).sum()
    assert value(found, "first token's entropy", temperature=t) == pytest.approx(entropy, abs=1e-3)
    tokens = value(found, "effective number of first tokens", temperature=t)
    assert tokens == pytest.approx(np.exp(entropy), rel=1e-3)
    ends = [int(i) for i in run.record["identity"]["chat"]["stop_ids"]]
    ended = value(found, "mass on turn-end", temperature=t)
    assert ended == pytest.approx(p[ends].sum(), rel=1e-2)  # stored in half precision


def test_where_greedy_leaves_each_turn(measured, run, planted, header):
    turns = measured[0].set_index(KEY)
    assert len(turns) == len(run.contexts) * 2 * SAMPLES
    written = run.generations.set_index(KEY)["token_ids"]
    checked = 0
    for key, row in turns.iterrows():
        last, at = header, 0
        for token in written[key]:
            log_p = planted.log_p(last)
            if token != log_p.argmax():
                break
            last, at = int(token), at + 1
        else:
            assert np.isnan(row["token"])
            continue
        assert row["token"] == at + 1
        assert row["rank"] == 1 + (log_p > log_p[token]).sum()
        assert row["gap"] == pytest.approx(log_p.max() - log_p[token], abs=1e-3)
        checked += 1
    assert checked > 50


def test_the_logit_lens_and_the_layer_from_which_greedy_is_ahead(found, run, planted, header):
    """Layers below the block read one table, later ones the other, in every context."""
    tables = {layer: planted.before if layer < BLOCK else planted.after for layer in run.layers}
    greedy = LIKELIEST + header % CLASSES
    assert greedy == planted.log_p(header).argmax()
    sampled = run.generations[run.generations["temperature"] > 0]
    first = sampled["token_ids"].map(lambda ids: int(ids[0]))
    follow_up = sampled["sample"] % 3 == 1  # as they were judged; every third turn repeats
    restated = sampled["sample"] % 3 == 0
    ahead = []
    for source in run.contexts["source_id"]:
        others = sampled["source_id"] != source
        counts = [first[others & kind].value_counts() for kind in (follow_up, restated)]
        share = counts[0].div(counts[0].add(counts[1], fill_value=0), fill_value=0)
        best = [token for token in share.index[share >= 0.5] if token != greedy]
        said = {layer: log_softmax(tables[layer][header % CLASSES]) for layer in run.layers}
        ahead.append([said[layer][greedy] > said[layer][best].max() for layer in run.layers])
    for_good = np.flip(np.logical_and.accumulate(np.flip(np.array(ahead), 1), axis=1), 1)
    for layer in run.layers:
        log_p = log_softmax(tables[layer][header % CLASSES])[greedy]
        said = value(found, "log p by the lens", layer=layer, term=GREEDY)
        assert said == pytest.approx(log_p, abs=1e-3)
        share = value(found, "greedy ahead for good", layer=layer)
        assert share == pytest.approx(for_good[:, layer].mean()) == (layer >= BLOCK)
