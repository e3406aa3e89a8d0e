import os, shutil
from pathlib import Path
import numpy as np, pytest
from judging import judged_by_chance
from shell import call
from test_mass_vector import measured, run  # noqa
from experiments.mass_vector import main as mv
from experiments.learned_vector import main as lv
from ia_mech.run import Run
OUT = Path(os.environ["SAME_OUT"])

def test_same(run, capfd):
    measured(run)
    for name, main, more in (
        ("tmv", mv, "--steps 2 --layer 2 --kl 0.01"),
        ("tlv", lv, "--steps 2 --layers 1 2"),
        ("tlvq", lv, "--steps 2 --layers 2 --quick --positions header_last turn"),
    ):
        shutil.rmtree(OUT / name, ignore_errors=True)
        words = [str(run.path), "--resamples", "200", *more.split(), "--out", str(OUT / name), "--full"]
        plan = call(main, [*words, "--dry-run"], capfd)
        found = call(main, words, capfd)
        (OUT / f"{name}.txt").write_text(plan.out + plan.err[:0] + "=====\n" + found.out)
        print(found.err)
        assert found.status == 0
