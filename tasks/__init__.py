"""Prefect tasks: each unwraps values, calls one service of a driven run, and returns a small plain value.

Called by flows. No tensor, model, dataset or filesystem object crosses a task's boundary; `running` holds the live objects.
"""
