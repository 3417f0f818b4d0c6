"""`mem audit`: parts of a run are trained again in fresh processes and held against what its journal says was committed.

Called by the command. Nothing here ever writes into the run that is looked at; what is trained lies in a temporary folder and is gone.
"""
