"""``ia-mech COMMAND …``: every command; ``python -m MODULE`` is the same as any of them.

Modules are named as text, and imported when their command is given.
"""

import importlib
import subprocess
import sys
from pathlib import Path

from ia_mech import __version__
from ia_mech.cli import did_you_mean, program, refuse, run_command

COMMANDS = {
    "sample": (
        "ia_mech.collect.command",
        "let a model write user turns; keep its states and logits",
    ),
    "capture": ("ia_mech.collect.capture", "add states of any token of contexts and turns"),
    "judge": ("ia_mech.judge.__main__", "label turns (is it a follow-up?); compare labels"),
    "study": ("experiments.study", "all steps and experiments on one model, on one page"),
    "compare": ("experiments.compare", "several studies side by side"),
    "rates": ("ia_mech.rates.__main__", "how often turns are follow-ups, and a check of the judge"),
    "temperature-sweep": ("experiments.temperature_sweep", "how turns change with temperature"),
    "mass": ("experiments.mass", "the follow-up mass: how likely first tokens lead to follow-ups"),
    "report": ("ia_mech.report.__main__", "one page with all results on a run, and its turns"),
    "annotate": ("ia_mech.annotate", "a page to label turns by hand, which hides the judge"),
    "locate": (
        "experiments.locate",
        "activation patching: which tokens and layers turns depend on",
    ),
    "reaction": ("experiments.reaction", "how many bits turns tell about their response"),
    "probes": ("probes.train", "in which layers labels can be read"),
    "interchange": (
        "experiments.interchange",
        "whether another conversation's state changes the rate",
    ),
    "elicit": ("experiments.elicit", "what brings out more follow-ups than greedy decoding"),
    "perturbations": ("experiments.perturbations", "which edits of the response change turns"),
    "steering": ("experiments.steering", "whether adding a direction changes the turn"),
    "mass-vector": ("experiments.mass_vector", "learn a vector that raises the follow-up mass"),
    "post-training": ("experiments.post_training", "train on user turns"),
}
GROUPS = {  # heading → the first of its commands
    "to begin with": "sample",
    "how often": "study",
    "where": "locate",
    "what moves it": "elicit",
}


def usage() -> str:
    """All commands in groups, a line each."""
    heading = {first: f"\n{group}:" for group, first in GROUPS.items()}
    lines = ["usage: ia-mech COMMAND …"]
    for name, (_, about) in COMMANDS.items():
        if name in heading:
            lines.append(heading[name])
        lines.append(f"  {name:<18}{about}")
    first = f"first: {program()} sample --out cache/first; then run what it prints after 'next:'"
    return "\n".join([*lines, "", first, "ia-mech COMMAND --help explains each."])


def version() -> str:
    """The version; in a checkout also its commit, and whether files differ from it."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git
        return __version__
    return f"{__version__} ({described.strip()})"


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        return run_command(lambda: print(usage()), str)
    if words[0] == "--version":
        print(f"ia-mech {version()}")
        return 0
    if words[0] not in COMMANDS:
        meant = did_you_mean(words[0], COMMANDS)
        return refuse(f"no command {words[0]!r}{meant}; ia-mech --help lists them")
    return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
