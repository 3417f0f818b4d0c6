"""The doctor's look at the data: the real reader and encoder over the first rows of each file.

Called by the composition root. Changes nothing; what it cannot find out it leaves to preparation.
"""
