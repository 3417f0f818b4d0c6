"""What the fork server imports once, so that every worker has it at birth."""

import transformers as _transformers  # noqa: F401
import transformers.models.llama.modeling_llama as _llama  # noqa: F401

import mem_core.runtime.checkpoint_manager.inspection.validator
import mem_core.runtime.deepspeed.runner
import mem_core.runtime.ranks.worker.main  # noqa: F401
from mem_core.runtime.deepspeed.preload import import_lazy_parts

import_lazy_parts()
