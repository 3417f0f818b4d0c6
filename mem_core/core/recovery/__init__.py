"""What follows a failure: the next action, deadlines, the length of a segment, stragglers, spikes. Pure.

Called by the session. Every bound on going on is here; nothing here waits, starts or kills.
"""
