"""Values that everybody shares: requests, reports, plans, outcomes, manifests, events, errors.

Called by everything above. It imports the standard library and pydantic only, reads no file, asks no clock, and decides nothing.
"""
