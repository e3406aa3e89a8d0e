"""The main job: the only place where text (``chat``) and tensors (``engine``) meet.

It plans, runs and resumes a run and writes it through ``run``; it knows no judge and no probe.
"""
