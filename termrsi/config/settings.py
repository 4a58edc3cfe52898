"""What a stage was asked to do, as keys and values, and what differs between then and now."""

from collections.abc import Iterable, Mapping
from typing import Any

SHOWN = 4  # differences, each with both values
LONGEST = 60  # characters of a value


def flat(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:  # Any: as JSON has it
    """Values by the path at which they are set; a list is one value."""
    found: dict[str, Any] = {}
    for where, value in parts:
        if isinstance(value, dict) and value:
            found |= flat((f"{where}.{key}", inner) for key, inner in value.items())
        else:
            found[where] = value
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:  # Any: as JSON has it
    """The first few keys whose values differ, with both, and how many more there are; "" if none is known."""
    changed = [key for key in {**now, **before} if key not in before or key not in now or before[key] != now[key]] if before else []
    told = [f"{key}={_short(before, key)}, now {_short(now, key)}" for key in changed[:SHOWN]]
    more = [f"{len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
    return ", ".join([*told, *more])


def _short(values: Mapping[str, Any], key: str) -> str:
    text = str(values.get(key, "not set"))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
