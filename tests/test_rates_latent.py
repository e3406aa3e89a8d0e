"""Whether awareness is latent, as rates say it, of planted verdicts."""

import numpy as np
import pandas as pd
import pytest

from ia_mech.estimates import frame_of, holm_corrected
from ia_mech.rates.compute import NAMES
from ia_mech.rates.latent import PARTS, rises, verdict
from ia_mech.stats import holm


def decoys(
    copies: tuple[float, float], rates: tuple[float, float], queries: int = 80, temperatures=(0.7,)
) -> pd.DataFrame:
    """A turn in four is greedy. Shares of copies, of which none is accepted, and rates of the
    others, greedy and sampled; after another conversation a tenth of all is accepted."""
    rng = np.random.default_rng(0)
    each = np.concatenate([[0.0], np.repeat(temperatures, 3)])
    rows = pd.DataFrame({"temperature": np.tile(each, 4 * queries), "decoy": "conversation"})
    rows["source"] = np.repeat(np.arange(queries), 4 * len(each))
    heated = (rows["temperature"] > 0).astype(int)
    copied = rng.random(len(rows)) < np.array(copies)[heated]
    accepted = ~copied & (rng.random(len(rows)) < np.array(rates)[heated])
    floor = rng.random(len(rows)) < 0.1
    return rows.assign(
        copies=copied.astype(float), own_genuine=accepted.astype(float), genuine=floor.astype(float)
    )


def estimated(rows: pd.DataFrame) -> pd.DataFrame:
    found = holm_corrected(rises(rows, {"model": "m"}), lambda row: row.quantity)
    return frame_of(found, NAMES)


def test_less_copying_alone_is_no_latent_awareness():
    rows = estimated(decoys((0.5, 0.1), (0.5, 0.5)))
    assert rows["quantity"].tolist() == list(PARTS)
    rise, copying, rest = rows["value"]
    assert rise == pytest.approx(copying + rest) and copying == pytest.approx(0.2, abs=0.04)
    said = verdict(rows)
    assert said.startswith("Latent awareness isn't shown at T = 0.7: beyond")
    assert f"of which less copying of the conversation makes {copying:+.2f} [" in said
    assert said.endswith("would have been).")


def test_more_follow_ups_among_other_turns_are():
    rows = estimated(decoys((0.3, 0.3), (0.2, 0.5)))
    assert rows["value"][2] == pytest.approx(0.21, abs=0.04)
    assert verdict(rows).startswith("Latent awareness is shown at T = 0.7: beyond")
    fewer = verdict(estimated(decoys((0.3, 0.3), (0.5, 0.2))))
    assert fewer.startswith("Latent awareness isn't shown")


def test_of_several_temperatures_the_best_is_corrected_for_all():
    rows = decoys((0.3, 0.3), (0.2, 0.5), temperatures=(0.7, 1.0))
    hot = rows["temperature"] == 1
    found = estimated(rows.assign(own_genuine=rows["own_genuine"].where(~hot, 0.0)))
    rest = found[found["quantity"] == PARTS[-1]].set_index("temperature")
    assert np.allclose(rest["p_holm"], holm(rest["p"]))
    assert "is shown at T = 0.7, the highest of 2 temperatures: beyond" in verdict(found)


def test_what_cant_be_told_isnt():
    rows = decoys((0.3, 0.3), (0.2, 0.5))
    few = verdict(estimated(rows[rows["source"] < 49]))
    assert few == "Whether awareness is latent isn't told of fewer than 50 queries."
    for lacking in (
        rows[rows["temperature"] > 0],
        rows[rows["temperature"] == 0],
        rows.assign(copies=np.nan),  # a rubric without such categories
        rows.assign(decoy="sibling"),
    ):
        assert verdict(estimated(lacking)) == ""
