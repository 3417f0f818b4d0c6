"""Which files a request means, and their rows, checked one by one in bounded memory.

Called by `encoding` and the doctor's look. Nothing is fetched twice, and every bad row is named by file and line.
"""
