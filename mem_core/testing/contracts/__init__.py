"""What every adapter of a port must do, as tests: subclass the suite and give it the adapter.

Called by `tests/contract`, and by whoever writes an adapter of their own. A suite never looks inside the adapter that it is given.
"""
