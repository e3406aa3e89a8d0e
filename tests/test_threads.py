"""``--threads``, and what an import does to threads: nothing."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from ia_mech.cli import THREAD_COUNTS, run_command

IMPORT = (
    "import os, sys; before = dict(os.environ); import {}; "
    "print(os.environ == before, 'torch' in sys.modules)"
)


@pytest.mark.parametrize("package", ["ia_mech", "probes", "experiments", "benchmarks"])
def test_an_import_sets_nothing_and_loads_no_torch(package):
    command = [sys.executable, "-c", IMPORT.format(package)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "False"]


def seen() -> list:
    return [torch.get_num_threads(), *map(os.environ.get, THREAD_COUNTS)]


@pytest.mark.parametrize("threads", [3, None])
def test_a_command_computes_with_its_threads(threads):
    before, during = seen(), []
    assert run_command(lambda: during.extend(seen()), str, threads=threads) == 0
    assert during == (before if threads is None else [3, "3", "3", "3"])


COMMANDS = ["ia_mech.judge.__main__ run", "ia_mech.judge.__main__ agreement"]
COMMANDS += ["ia_mech.rates.__main__", "ia_mech.collect.command", "probes.train"]
COMMANDS += [
    "experiments.reaction",
    "experiments.post_training sft",
    "experiments.post_training compare",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_compute_take_threads(command, capsys):
    module, *words = command.split()
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(module).main([*words, "--threads", "0", "--help"])
    assert stopped.value.code == 2
    assert "--threads: '0' is not a whole number" in capsys.readouterr().err
