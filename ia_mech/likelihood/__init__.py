"""How likely given user turns are after their own context and after counterfactual ones.

``chat`` gives the token ids and ``engine`` their scores. Nothing here computes tensors, reads files
or schedules a run. ``reaction`` is a module of functions of likelihood arrays.
"""
