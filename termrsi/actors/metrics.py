"""`ports.Meter` on Ray's metrics: the agent of each node serves them to Prometheus, as `ray_termrsi_NAME`."""

from ray.util import metrics

from termrsi.report.meters import SECONDS, Instrument, Kind, check


class RayMeter:
    """One per process. Takes effect once Ray is connected; an instrument is made when it is first used."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._made: dict[str, metrics.Metric] = {}

    def __call__(self, name: str, value: float = 1.0, **labels: str) -> None:
        instrument = check(name, labels)
        if name not in self._made:
            self._made[name] = _make(name, instrument).set_default_tags({"run": self._run})
        match made := self._made[name]:
            case metrics.Counter():
                if value > 0.0:  # Ray takes no addition of nothing
                    made.inc(value, labels)
            case metrics.Gauge():
                made.set(value, labels)
            case metrics.Histogram():
                made.observe(value, labels)


def _make(name: str, instrument: Instrument) -> metrics.Metric:
    name, labels = f"termrsi_{name}", ("run", *instrument.labels)
    match instrument.kind:
        case Kind.counter:
            return metrics.Counter(name, instrument.what, labels)
        case Kind.gauge:
            return metrics.Gauge(name, instrument.what, labels)
        case Kind.histogram:
            return metrics.Histogram(name, instrument.what, list(SECONDS), labels)
