"""Refusals that most settings share: each raises ConfigError with what would be valid."""

from termrsi.errors import ConfigError


def at_least(where: str, minimum: float, **values: float) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ConfigError(f"{name}={value} is too small", where, f"valid: {minimum} or more")


def above_zero(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise ConfigError(f"{name}={value}", where, "valid: above 0")


def one_of(where: str, value: str, *valid: str) -> None:
    if value not in valid:
        raise ConfigError(f"{value!r} is unknown", where, f"valid: {', '.join(valid)}")
