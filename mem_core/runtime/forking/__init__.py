"""`mem fork`: a proven checkpoint of one run becomes the beginning of another.

Called by `flows/commands/branches`. The origin is only read; the new run's folder appears whole or not at all, and nothing trains here.
"""
