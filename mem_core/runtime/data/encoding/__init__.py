"""Rows to token shards, in a process of its own, kept in a cache that is keyed by all that decides its content.

Called by the prepare step. A folder of the cache is whole or not there; it is believed by its bytes.
"""
