"""How far judges and people agree, on a run or on annotated turns of a file."""

from ia_mech.judge.agreement.comparison import Comparison, compare, group_alpha
from ia_mech.judge.agreement.labellers import Agreement, agreement, joint_rows
from ia_mech.judge.agreement.tables import print_comparison

__all__ = [
    "Agreement",
    "Comparison",
    "agreement",
    "compare",
    "group_alpha",
    "joint_rows",
    "print_comparison",
]
