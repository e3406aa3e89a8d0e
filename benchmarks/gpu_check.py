"""The tests that need a GPU, then the benchmark on it; one report of both.

    python -m benchmarks.gpu_check [--out FILE]

What the two print goes to the terminal and to the report. The exit status is 1 if either failed.
"""

import datetime
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import torch
import transformers

from ia_mech.cli import Parser, run_command
from ia_mech.errors import UserError

ROOT = Path(__file__).parents[1]
STEPS = (
    ("pytest", "-m", "gpu", "-n", "0", "-v", "-rs", "tests/test_cuda.py"),
    ("benchmarks.sampling", "--device", "cuda"),
)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = Parser(prog="python -m benchmarks.gpu_check", description=__doc__)
    out = Path("gpu-check.txt")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"(default: {out})")
    out = parser.parse_args(argv).out

    def body() -> int:
        if not torch.cuda.is_available():
            raise UserError("no CUDA device is available here", "use a machine with a GPU")
        try:
            report = out.open("w", encoding="utf-8")
        except OSError as error:
            problem = f"{out} can't be written ({error.strerror})"
            raise UserError(problem, "give another --out") from error
        with report:
            say(report, facts())
            failed = [words[0] for words in STEPS if run(words, report)]
            say(report, f"\nfailed: {', '.join(failed) or 'nothing'}; the report is {out}\n")
        return int(bool(failed))

    return run_command(body, lambda: f"what was printed so far is in {out}")


def facts() -> str:
    """What the results depend on, on one line."""
    memory = torch.cuda.get_device_properties(0).total_memory
    return (
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {memory / 2**30:.0f} GiB, "
        f"CUDA {torch.version.cuda}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )


def run(words: tuple[str, ...], report: TextIO) -> int:
    """Run a module in a process of its own and show its output; returns the exit status."""
    say(report, f"\n$ python -m {' '.join(words)}\n")
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None  # a pipe, as asked for above
        for line in process.stdout:
            say(report, line)
    return process.returncode


def say(report: TextIO, text: str) -> None:
    """To the terminal and to the report."""
    print(text, end="", flush=True)
    report.write(text)
    report.flush()


if __name__ == "__main__":
    sys.exit(main())
