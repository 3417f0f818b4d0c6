"""Token shards to micro-batches: which rows form a batch, how it is cut over ranks, rows to tensors.

Called by ranks and by the supervisor's memory plans. Costs the same at any step; pure but for reading mapped files.
"""
