"""Planners: who may propose hyper-parameters. None of them can apply anything (I7)."""
