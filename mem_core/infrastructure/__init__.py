"""Edges: the machine, request files, stores, telemetry, planners, settings. Each behind a narrow port.

Called by core and the layers above it. Decides nothing about a run, and imports neither core nor runtime.
"""
