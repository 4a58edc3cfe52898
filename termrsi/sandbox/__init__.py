"""Machines for agents. `make` is the one way in; the pool (`local_pool`) and the actors build on it."""

from termrsi.errors import ConfigError
from termrsi.ports import Sandbox


def make(backend: str = "local", **options: object) -> Sandbox:
    """A sandbox, not yet started. `options`: the fields of `local.LocalOptions`. Raises ConfigError."""
    if backend != "local":
        raise ConfigError(f"sandbox backend {backend!r} is not in this version", "sandbox.make", "use 'local', the only one")
    import dataclasses
    import difflib

    from termrsi.sandbox.local import LocalOptions, LocalSandbox

    names = [field.name for field in dataclasses.fields(LocalOptions)]
    for name in options:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, 1)
            valid = f"did you mean {nearest[0]}?" if nearest else f"valid: {', '.join(names)}"
            raise ConfigError(f"no option {name!r}", "sandbox.make", valid)
    return LocalSandbox(LocalOptions(**options))  # pyright: ignore[reportArgumentType]  # checked by name above
