# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""One arm of `tests.bench.bench_learner`, in a process of its own: `python learner_side.py ours|trl SETTINGS OUT`.

SETTINGS is a JSON of `bench_learner.Settings` with the samples, OUT becomes one of `Measured`. TRL's arm is run by the interpreter
of .venv-peers. Hugging Face's `datasets` is not installed there: a class that hands out the tokenized samples stands in for it.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seconds = list[float]


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Bytes of this process in memory at most, since `forget_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def ours(settings: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], tuple[Seconds, list[float]]]]:
    """How the model is loaded, and how it is trained: seconds and loss of each step."""
    from termrsi.model.policy import PolicyModel
    from termrsi.records import Sample

    samples = [Sample(tuple(ids), tuple(mask), (0,) * len(ids)) for ids, mask in settings["samples"]]

    def load() -> PolicyModel:
        return PolicyModel(
            settings["model"],
            compute=settings["compute"],
            micro_tokens=settings["micro_tokens"],
            gradient_checkpointing=settings["checkpointing"],
        )

    def train(policy: PolicyModel) -> tuple[Seconds, list[float]]:
        found = [policy.fit(samples, settings["lr"]) for _ in range(settings["steps"])]
        return [one.seconds for one in found], [one.loss for one in found]

    return load, train


def trl(settings: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], tuple[Seconds, list[float]]]]:
    """TRL's SFTTrainer: float32 weights, autocast for bf16, fused AdamW, as many optimizer steps on the same samples.

    A micro-batch has as many rows as the longest sample lets `micro_tokens` hold, of samples of like length (`group_by_length`).
    """
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # verl brings a package `tests` of its own
    from peer_side import StandIns

    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]: says that it is not installed; loading it takes longest
    sys.meta_path.append(StandIns("datasets", "pandas"))
    import datasets

    datasets.__version__, datasets.Dataset = "4.0.0", type("Dataset", (), {})  # one class, for whoever asks what samples are
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}
        for ids, mask in settings["samples"]
    ]

    class Samples(datasets.Dataset):
        column_names = ("input_ids", "labels")

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> dict[str, list[int]]:
            return rows[i]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.starts: Seconds = []
            self.ends: Seconds = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.starts.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            self.ends.append(time.perf_counter())

    longest = max(len(row["input_ids"]) for row in rows)
    per_device = max(1, settings["micro_tokens"] // longest)

    def load() -> Any:  # Any: a transformers model
        import torch

        return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, local_files_only=True)

    def train(model: Any) -> tuple[Seconds, list[float]]:  # Any: as above
        clock = Clock()
        config = SFTConfig(
            output_dir=settings["scratch"],
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=-(-len(rows) // per_device),
            train_sampling_strategy="group_by_length",
            num_train_epochs=settings["steps"],
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=settings["compute"] == "bf16",
            gradient_checkpointing=settings["checkpointing"],
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            use_cpu=True,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            remove_unused_columns=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(settings["model"], local_files_only=True)
        trainer = SFTTrainer(model, config, train_dataset=Samples(), processing_class=tokenizer, callbacks=[clock])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [end - start for start, end in zip(clock.starts, clock.ends, strict=True)], losses

    return load, train


def main(arm: str, settings_path: str, out: str) -> None:
    import torch

    settings = json.loads(Path(settings_path).read_text())
    torch.set_num_threads(settings["threads"])
    load, train = {"ours": ours, "trl": trl}[arm](settings)
    gc.collect()
    forget_peak()
    imported = resident()
    model = load()
    gc.collect()
    loaded = resident()
    seconds, losses = train(model)
    found = {"seconds": seconds, "losses": losses, "imported": imported, "loaded": loaded, "peak": peak()}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
