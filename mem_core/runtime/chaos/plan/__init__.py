"""Chaos as a value: the kinds of fault there are, and a seeded plan of them. Pure.

Called by the drill and its report. The same seed gives the same faults at the same steps for ever.
"""
