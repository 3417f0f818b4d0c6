"""Conversations to ids and loss masks: what a chat template renders, and where in it the assistant's words stand.

Called by the encoder of a model folder. Nothing here guesses: what cannot be told apart is refused, row by row.
"""
