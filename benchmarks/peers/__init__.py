"""Plug-ins, one for each implementation that is timed.

A plug-in has

* ``TITLE``; ``ENV``, the folder of its Python environment ("" for that of run.py);
  ``REQUIREMENTS``, what pip installs there; ``FIRST_CALL_COMPILES``, whether memory is to be
  measured in the second call; all of them literals, since run.py reads them without importing;
* ``start(threads)``, called once;
* ``variants(case, arrays)``, which returns for each way to do a case a function that builds it:
  ``build() -> (call, to_numpy)``. ``call()`` is timed, ``to_numpy(its result)`` is checked, of
  shape (batch, num_heads, len_q, d) or (batch, len_q, num_heads · d).

It raises what it likes for what it cannot do: the message is shown where its figure would be.
"""
