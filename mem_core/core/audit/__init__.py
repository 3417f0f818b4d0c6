"""What of a run can be trained again, how, and what comes of holding that against its record. Pure, but for reading no file at all.

Called by `runtime/proof/audit` and the command. Nothing here trains, decides about a run or writes anything.
"""
