"""What an analysis shows and keeps: its conclusion, the terminal report, figures and files.

Nothing here fits a probe for a score; the kept directions are fitted by ``probes.card``.
"""
