"""What strikes: processes, files, services, and the inside of a rank; and what is seen of a run from outside while it is struck.

Called by `RealChaos`. Each fault proves that it fired.
"""
