"""Makes the model folder and the data of the frozen runs: `python make_inputs.py FOLDER` writes FOLDER/model and FOLDER/data.jsonl.

A causal language model that is as small as one can be (a Llama of one layer, 4,016 numbers, weights drawn from a seed) with a
byte-level tokenizer, and 240 rows of plain English sentences put together from a few words.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

SEED = 20
NUM_ROWS = 240
# Ids of the byte-level tokenizer are bytes + 3, and the sentences are ASCII: every id is below this.
VOCAB_SIZE = 136
PEOPLE = ("the miller", "a sailor", "my aunt", "the clerk", "a baker", "their teacher", "the old gardener", "a nurse")
DEEDS = ("counts", "carries", "sells", "paints", "looks for", "gives away", "mends", "hides")
THINGS = ("seven lamps", "a wooden boat", "the long ladder", "two blue jars", "a map", "old letters", "the red kettle", "warm bread")
PLACES = ("by the river", "in the morning", "behind the mill", "before the rain", "on the third floor", "without a word")


def write_model(folder: Path) -> None:
    """A Hugging Face folder: config.json, model.safetensors, tokenizer files."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)


def write_data(path: Path) -> None:
    """One JSON object a line, its text one to four sentences."""
    draw = random.Random(SEED)
    with path.open("w", encoding="ascii") as file:
        for _ in range(NUM_ROWS):
            parts = [[draw.choice(words) for words in (PEOPLE, DEEDS, THINGS, PLACES)] for _ in range(draw.randint(1, 4))]
            text = " ".join(f"{' '.join(words)}.".capitalize() for words in parts)
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_model(target / "model")
    write_data(target / "data.jsonl")
