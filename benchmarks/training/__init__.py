"""Plug-ins that train: one for each implementation whose gradients are timed.

They are what those in ``peers/`` are, but ``call()`` computes what ``case.results`` names, and
``to_numpy(its result)`` is a dict of arrays under these names, of the shapes given there. With
dropout the dict also has ``kept``, (len_q, len_kv): which weights of the last head it has kept.
A mask that follows from a seed shows itself when all scores are equal and value is the identity.
"""
