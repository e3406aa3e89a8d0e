"""Blind sheets for people: drawn from a run's user turns, filled in elsewhere, read back."""

from ia_mech.judge.sheets.draw import export_sheet, write_sheet
from ia_mech.judge.sheets.read_back import import_sheet

__all__ = ["export_sheet", "import_sheet", "write_sheet"]
