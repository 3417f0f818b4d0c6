"""What the bytes of a checkpoint prove: manifest, hashes, shards, pickles, tensors. Reads only; nothing is unpickled unproven.

Called by the manager, the mirror, the validator's process and the export.
"""
