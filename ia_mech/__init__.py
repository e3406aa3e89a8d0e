"""ia_mech: where interaction awareness sits in a chat model.

``from ia_mech import sample, label, Run, study``: :func:`sample` makes a run, :func:`label` labels
its turns with a judge (a program or a model), :class:`Run` reads the run, and :func:`study` makes a
whole study of a model. In a shell: ``ia-mech sample``, ``ia-mech judge run``, ``ia-mech study``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.study import study
    from ia_mech.collect.command import sample
    from ia_mech.judge import label
    from ia_mech.run import Run

__all__ = ["Run", "label", "sample", "study"]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is used."""
    if name == "sample":
        from ia_mech.collect.command import sample

        return sample
    if name == "label":
        from ia_mech.judge import label

        return label
    if name == "Run":
        from ia_mech.run import Run

        return Run
    if name == "study":
        from experiments.study import study

        return study
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
