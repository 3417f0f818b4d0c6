"""Files to a folder of token rows: the work itself, what is told of it meanwhile, and what is told at its end.

Called by the tokenising process and by the doctor's look. Nothing is published here, and nothing refused for its rows.
"""
