"""Proving that a checkpoint is what it says: judged in a process of its own, replayed, resharded, verified from outside.

Called by the session and by `mem checkpoints verify`. A proof changes nothing that it looks at.
"""
