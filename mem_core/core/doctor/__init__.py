"""The doctor: from observations and a request to findings with remedies. Pure.

Called by `bootstrap.examine_only`; observing is `infrastructure/machine`'s work. Changes nothing, and never says ready to what is refused.
"""
