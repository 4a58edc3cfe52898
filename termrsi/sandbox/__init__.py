"""Machines for agents. `make` is the one way in; the pool (`host_pool`) and the actors build on it."""

from termrsi.errors import ConfigError
from termrsi.ports import Sandbox


def make(backend: str = "local", **options: object) -> Sandbox:
    """A sandbox, not yet started. `options`: the fields of the backend's options. Raises ConfigError."""
    import dataclasses
    import difflib

    from termrsi.sandbox.docker import DockerOptions, DockerSandbox
    from termrsi.sandbox.gvisor import GvisorOptions, GvisorSandbox
    from termrsi.sandbox.local import LocalOptions, LocalSandbox

    kinds = {
        "local": (LocalOptions, LocalSandbox),
        "docker": (DockerOptions, DockerSandbox),
        "gvisor": (GvisorOptions, GvisorSandbox),
    }
    if backend not in kinds:
        raise ConfigError(f"sandbox backend {backend!r} is not known", "sandbox.make", f"valid: {', '.join(kinds)}")
    options_of, sandbox_of = kinds[backend]
    names = [field.name for field in dataclasses.fields(options_of)]
    for name in options:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, 1)
            valid = f"did you mean {nearest[0]}?" if nearest else f"valid: {', '.join(names)}"
            raise ConfigError(f"no option {name!r}", "sandbox.make", valid)
    return sandbox_of(options_of(**options))  # pyright: ignore[reportArgumentType]  # checked by name above
