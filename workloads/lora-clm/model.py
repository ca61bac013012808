"""The language model with its adapters, ready for DeepSpeed, and its tokeniser; nothing comes from a network."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import transformers
from arguments import check_targets
from peft import LoraConfig, get_peft_model
from script_exit import InputError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.pytorch_utils import Conv1D


def load_tokenizer(directory: Path | None) -> Any:
    """Load the tokeniser of the model's directory, ``byte_tokenizer()`` without one. InputError if unreadable."""
    if directory is None:
        return byte_tokenizer()
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {directory}: no tokeniser to read: {str(error).splitlines()[0]}") from error


def byte_tokenizer() -> Any:
    """Return a tokeniser whose tokens 2 to 257 are the bytes; 0 begins and 1 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def load_shape(args: Namespace, tokenizer: Any) -> Any:
    """Return the model's configuration. InputError if it is too short for the sequences or lacks a target layer."""
    if args.model:
        shape = transformers.AutoConfig.from_pretrained(args.model, local_files_only=True)
    else:
        shape = random_shape(args.sequence_length, len(tokenizer))
    longest = getattr(shape, "max_position_embeddings", args.sequence_length)
    if args.sequence_length > longest:
        raise InputError(f"--sequence-length {args.sequence_length}: the model takes at most {longest} tokens")
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(shape)
    adaptable = (nn.Linear, nn.Embedding, Conv1D)
    check_targets(args.target_modules, [name for name, layer in empty.named_modules() if isinstance(layer, adaptable)])
    return shape


def random_shape(sequence_length: int, vocabulary: int) -> Any:
    """Return the configuration of a small Llama, with weights five times as wide as usual."""
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(512, sequence_length),
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )


def build(args: Namespace, shape: Any, config: dict[str, Any]) -> Any:
    """Build the model, loaded or random, with LoRA adapters; partitioned while it is read under ZeRO-3."""
    # transformers looks at this object for as long as it lives.
    partitioned = HfDeepSpeedConfig(config)
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, config=shape, dtype=dtype(config), local_files_only=True, use_safetensors=True
        )
    else:
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype(config))
    del partitioned
    model.config.use_cache = False
    if args.gradient_checkpointing == "on":
        # Reentrant: ZeRO-3 empties weights between forward pass and recomputation, an error to the other kind.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        # Reentrant checkpointing gives no gradient to a block whose inputs need none, and the embeddings are frozen.
        model.enable_input_require_grads()
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.target_modules,
    )
    return get_peft_model(model, adapters, autocast_adapter_dtype=False)


def precision(config: dict[str, Any]) -> str:
    """Return the precision that the configuration enables: ``bf16``, ``fp16``, else ``fp32``."""
    return next((name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled")), "fp32")


def dtype(config: dict[str, Any]) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision(config)]


def counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trained and of all weights, ZeRO-3's partitioned ones counted whole."""
    sizes = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)
