"""Tiny models and tokenizers of all families that are written as GGUF files."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from megatrain.storage.gguf_file import SPLITS

ROWS = 320  # of the embedding: more than there are tokens
SIZES: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": ROWS}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.2}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MIXED: Any = {"num_experts": 4, "num_experts_per_tok": 2}
GEMMA: Any = SIZES | {"hidden_size": 32, "pad_token_id": 0, "sliding_window": 8}
# Where the reader of transformers does not read a size, it is the family's usual one.
CONFIGS: dict[str, Any] = {
    "llama": lambda **more: transformers.LlamaConfig(**SIZES, **{"rope_parameters": ROPE, **more}),
    "mistral": lambda **more: transformers.MistralConfig(**SIZES, head_dim=32, **more),
    "mixtral": lambda **more: transformers.MixtralConfig(**SIZES, num_local_experts=4, **more),
    "qwen2": lambda **more: transformers.Qwen2Config(**SIZES, **more),
    "qwen3": lambda **more: transformers.Qwen3Config(**SIZES, **{"head_dim": 128, **more}),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(
        **SIZES, **MIXED, **{"head_dim": 32, "norm_topk_prob": True, **more}
    ),
    "gemma3_text": lambda **more: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 7, **more}
    ),
}
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_level(name: str = "gpt-2") -> PreTrainedTokenizerFast:
    """A tokenizer that splits as GGUF's `name` does."""
    patterns = {split: pattern for (pattern, _), split in SPLITS.items()}
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split: Any = plain
    if name == "smollm":
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif name != "gpt-2":
        words = pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated")
        bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Sequence([words, bare])
    whole = {kept for (_, kept), known in SPLITS.items() if known == name} == {True}
    base = Tokenizer(models.BPE(ignore_merges=whole))
    base.pre_tokenizer, base.decoder = split, decoders.ByteLevel()
    if name == "qwen2":
        base.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    base.train_from_iterator(["hello world it is me, two lines of words 2024 " * 3], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=special[0], chat_template=CHAT)
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def of_sentencepiece(begins: str = "▁") -> PreTrainedTokenizerFast:
    """begins: with what every text does; not of Gemma, which splits at spaces instead."""
    base = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    base.normalizer = space
    if begins:
        base.normalizer = normalizers.Sequence([normalizers.Prepend(begins), space])
    else:
        base.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=310, special_tokens=special, show_progress=False)
    base.train_from_iterator(["hello world it is me two lines of words " * 3], trainer)
    found: dict[str, int] = base.get_vocab()
    order = sorted(found, key=found.__getitem__)
    pairs = [(p[:at], p[at:]) for p in order for at in range(1, len(p)) if p not in special]
    merges = [(a, b) for a, b in pairs if a in found and b in found]
    base.model = models.BPE(found, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    base.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    ends: Any = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=base, **ends)
