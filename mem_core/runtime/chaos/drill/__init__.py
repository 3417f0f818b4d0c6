"""A run under faults, its undisturbed twin, the comparison and the report.

Called by `mem drill`, `mem prove-resume` and the drill flow. Knows the commands only as argument lists.
"""
