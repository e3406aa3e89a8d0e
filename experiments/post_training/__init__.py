"""Training on user turns by ``trl`` and ``peft``, and what it changed.

``data`` (sequences and organisms), ``train`` and ``rl`` (the trainers), ``reading`` (turns after
each response, read by a model), ``compare`` (a run before and one after).
"""
