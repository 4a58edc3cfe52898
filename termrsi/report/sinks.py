"""Where metrics go: a JSON-lines file and a meter always, W&B when asked. A W&B fault costs the curve there, never the run."""

import json
import time
from pathlib import Path

from termrsi.config.schema import Config
from termrsi.durable import Lines
from termrsi.ports import Meter
from termrsi.report.curve import Curve
from termrsi.report.curves import CausalMeans
from termrsi.report.meters import silent


class Sinks:
    """Call it with a stage's name and its figures. Beside each figure of a step stands its causal mean."""

    def __init__(self, config: Config, run_dir: Path, meter: Meter = silent) -> None:
        self._meter = meter
        self._file = Lines(run_dir / "metrics.jsonl")
        self._means = CausalMeans()
        asked = config.logger
        self._wandb = None if asked.wandb == "off" else Curve(asked.project, run_dir, asked.wandb)

    def __call__(self, stage: str, figures: dict[str, float]) -> None:
        self._measure(stage, figures)
        figures = figures | self._means.observe(stage, figures)
        self._file.add(json.dumps({"time": time.time(), "stage": stage, **figures}))
        if self._wandb is not None:
            self._wandb.log({f"{stage}/{name}": value for name, value in figures.items()})

    def _measure(self, stage: str, figures: dict[str, float]) -> None:
        """Means are left to who reads them."""
        if "staleness" in figures:
            self._meter("staleness", figures["staleness"], stage=stage)
        for name, value in figures.items():
            self._meter("figure", value, stage=stage, figure=name)

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
