"""Chat templates in the forms that published models have, each with a small tokenizer that knows its marks. Written for tests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mem_core.testing.tokenizer_folders import byte_level_bpe, llama_2_form, tokenizer_folder

_ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}" + _ALTERNATE + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['function'] | tojson }}{% else %}{{ m['content'] | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + (m['content'] | trim) + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + '<|end_of_sentence|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """`end` is the token that ends a turn; `marks` are the tokens beside those of text; `system`: whether it takes system prompts."""

    template: str
    tokenizer: Callable[[], Any]
    bos: str
    eos: str
    end: str
    marks: tuple[str, ...] = ()
    system: bool = True


FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "Llama 2": Family(_LLAMA_2, llama_2_form, "<s>", "</s>", "</s>"),
        "Llama 3": Family(
            _LLAMA_3, byte_level_bpe, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ),
        "ChatML": Family(_CHATML, byte_level_bpe, "<|im_start|>", "<|endoftext|>", "<|im_end|>", ("<|im_end|>",)),
        "Mistral": Family(_MISTRAL, llama_2_form, "<s>", "</s>", "</s>", ("[INST]", "[/INST]"), system=False),
        "Gemma": Family(_GEMMA, llama_2_form, "<bos>", "<eos>", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>"), system=False),
        "Phi": Family(
            _PHI, llama_2_form, "<s>", "<|endoftext|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ),
        "Zephyr": Family(_ZEPHYR, llama_2_form, "<s>", "</s>", "</s>"),
        "DeepSeek": Family(
            _DEEPSEEK, byte_level_bpe, "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|end_of_sentence|>",
            ("<|User|>", "<|Assistant|>"),
        ),
    }
)  # fmt: skip


def family_folder(folder: Path, name: str, template: str | None = None, model_type: str = "llama") -> Path:
    """A tokenizer folder of a family; `template` in place of its own."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    tokenizer.add_special_tokens([family.bos, family.eos, *family.marks])
    settings = {"bos_token": family.bos, "eos_token": family.eos, "chat_template": template or family.template}
    return tokenizer_folder(folder, tokenizer, model_type, **settings)
