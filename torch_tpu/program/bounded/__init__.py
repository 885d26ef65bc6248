"""Bounded programs: one program for all sizes up to a bound.

* ``policy``: which calls get one, from what was seen of sizes that change.
* ``guesses``: which numbers of a call are such sizes.
* ``patterns``: a form with expressions, sampled, fitted and lifted for each bound.
* ``description``: a call as a form with numbers in it.
* ``expressions``: numbers as polynomials of the sizes that change.
* ``text``: the StableHLO of a lowering, read back.
* ``layout``: values longer than what they hold.
* ``lift``, ``*_rules``: programs for a few sizes → the program for all of them.
"""
