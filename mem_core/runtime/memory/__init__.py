"""Adaptive memory inside a rank: reading the counters, following and changing the plan of micro-batches.

Called by the runner, each step. Decisions are `core/memory`'s; a plan is recorded before anything is done under it.
"""
