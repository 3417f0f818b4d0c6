"""From files to batches: `reading` finds and checks rows, `encoding` makes token shards once, `serving` reads them by id.

Called by the prepare step and by ranks. A batch is a pure function of seed and index; nothing unproven is read from the cache.
"""
