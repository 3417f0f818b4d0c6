"""Values of what a run comes to: figures of held-out rows, and model folders.

Used by events, the result and whoever makes or shows them. Nothing here decides or acts.
"""
