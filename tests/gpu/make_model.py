"""Write a randomly initialised OPT model of a shape, with a tokenizer of its vocabulary size, for DeepSpeed-Chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def main(shape: Path, folder: Path, *, toy: bool) -> None:
    """Write a model of the shape with random bf16 weights, and its tokenizer, to ``folder``; if ``toy``, a tiny one."""
    config = json.loads(shape.read_text(encoding="utf-8"))
    if toy:
        config |= {"num_hidden_layers": 2, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
        config |= {"num_attention_heads": 2}
    words = (*SPECIAL, *(f"w{number}" for number in range(50265 - len(SPECIAL))))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(1234)
    torch.set_default_dtype(torch.bfloat16)
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    OPTForCausalLM(OPTConfig(**config)).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), toy="--toy" in sys.argv)
