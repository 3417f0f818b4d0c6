"""A run as Prefect's UI shows it: one live page, progress, news and curves, published by a thread of its own.

Called by `flows.context`. Whatever it cannot publish is dropped; it never waits on the training path.
"""
