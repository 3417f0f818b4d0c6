"""A run that begins with another one's whole state: what it may change, and what of the origin's history it takes along. Pure.

Called by `runtime/forking` and `flows/commands`. No file is touched here.
"""
