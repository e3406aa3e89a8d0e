"""``ia-mech COMMAND …``: every command; ``python -m MODULE`` is the same as any of them.

Modules are named as text, and imported when their command is given.
"""

import importlib
import subprocess
import sys
from pathlib import Path

from ia_mech import __version__
from ia_mech.cli import did_you_mean, refuse

COMMANDS = {
    "sample": ("ia_mech.collect.command", "user turns of a model, with states and logits"),
    "judge": ("ia_mech.judge.__main__", "label turns; sheets for annotators; agreement"),
    "rates": ("ia_mech.rates.__main__", "how often turns follow up, over a floor; latent or not"),
    "report": ("ia_mech.report.__main__", "one page of all results on a run, and its turns"),
    "annotate": ("ia_mech.annotate", "a blind page to annotate in"),
    "study": ("experiments.study", "all that a model's turns owe to the response, on one page"),
    "compare": ("experiments.compare", "several studies side by side"),
    "probes": ("probes.train", "where in the model labels can be read"),
    "transfer": ("probes.transfer", "do probes of one run or dataset work on another"),
    "reaction": ("experiments.reaction", "bits that turns tell about their response"),
    "locate": ("experiments.locate", "which states carry these bits"),
    "interchange": ("experiments.interchange", "whether follow-ups travel with a state"),
    "steering": ("experiments.steering", "whether a direction moves the turn"),
    "learned-vector": ("experiments.learned_vector", "where one vector opens reacting, by layer"),
    "elicit": ("experiments.elicit", "under which arm turns react more than greedily"),
    "perturbations": ("experiments.perturbations", "what of the response matters"),
    "temperature-sweep": ("experiments.temperature_sweep", "what temperature does"),
    "post-training": ("experiments.post_training", "train on user turns"),
}
GROUPS = {  # heading → the first of its commands
    "one step after another": "sample",
    "or all at once": "study",
    "where it can be read": "probes",
    "what moves it": "interchange",
}


def usage() -> str:
    """All commands in groups, a line each."""
    heading = {first: f"\n{group}:" for group, first in GROUPS.items()}
    lines = ["usage: ia-mech COMMAND …"]
    for name, (_, about) in COMMANDS.items():
        if name in heading:
            lines.append(heading[name])
        lines.append(f"  {name:<18}{about}")
    first = (
        "first: ia-mech sample --limit 60 --out cache/first, then what each prints after 'next:'"
    )
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
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"ia-mech {version()}")
        return 0
    if words[0] not in COMMANDS:
        meant = did_you_mean(words[0], COMMANDS)
        return refuse(f"no command {words[0]!r}{meant}; ia-mech --help lists them")
    return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
