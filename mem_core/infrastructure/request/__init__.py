"""From a file or text to a valid request or policy bounds, with errors that name field, value, bound and way out.

Called by commands, flows and bootstrap. Nothing from a file is run, and no secret is repeated in an error.
"""
