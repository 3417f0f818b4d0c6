"""Fakes, contract suites and drivers for tests, shipped with the package so that adapters of others can be held to the same.

Called by tests only. Production code never imports it.
"""
