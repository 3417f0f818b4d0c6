"""Verbs that make a run out of another one: `fork`. They read the origin and never change it.

Called by `flows/cli.py`. Nothing trains here, and no Prefect is imported.
"""
