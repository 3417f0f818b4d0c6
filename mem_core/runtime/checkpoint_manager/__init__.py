"""Checkpoints that deserve trust: staged, committed, proven, rotated."""

from mem_core.runtime.checkpoint_manager.background_mirror import BackgroundMirror, MirrorState
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.mirror import Mirror
from mem_core.runtime.checkpoint_manager.pickle_scan import DEFAULT_ALLOWED_GLOBALS, scan_torch_file
from mem_core.runtime.checkpoint_manager.restore import restore_from_mirror, resume_point
from mem_core.runtime.checkpoint_manager.rotation import plan_rotation
from mem_core.runtime.checkpoint_manager.shards import missing_shards, required_shards
from mem_core.runtime.checkpoint_manager.tensor_checks import load_safely
from mem_core.runtime.checkpoint_manager.validator import IntegrityValidator, Level, Replay, Validator

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
