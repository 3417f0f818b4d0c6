"""Checkpoints that deserve trust: staged, committed, proven, rotated. `CheckpointManager` is the only writer of a run's checkpoints.

Called by the session, the proofs and the checkpoint commands. Only what has been proven is a resume point; no older attempt publishes.
"""

from mem_core.runtime.checkpoint_manager.inspection.pickle_scan import DEFAULT_ALLOWED_GLOBALS, scan_torch_file
from mem_core.runtime.checkpoint_manager.inspection.shards import missing_shards, required_shards
from mem_core.runtime.checkpoint_manager.inspection.tensor_checks import load_safely
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator, Level, Replay, Validator
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.mirror.background import BackgroundMirror, MirrorState
from mem_core.runtime.checkpoint_manager.mirror.mirror import Mirror
from mem_core.runtime.checkpoint_manager.restore import restore_from_mirror, resume_point
from mem_core.runtime.checkpoint_manager.rotation import plan_rotation

__all__ = [
    "DEFAULT_ALLOWED_GLOBALS",
    "BackgroundMirror",
    "CheckpointManager",
    "IntegrityValidator",
    "Level",
    "Mirror",
    "MirrorState",
    "Replay",
    "Validator",
    "load_safely",
    "missing_shards",
    "plan_rotation",
    "required_shards",
    "restore_from_mirror",
    "resume_point",
    "scan_torch_file",
]
