"""Where the model that judges tasks comes from."""

from termrsi.errors import ConfigError
from termrsi.ports import Writer


def judge_of(url: str, model: str, key_env: str = "") -> Writer | None:
    """A model behind an OpenAI-compatible server, its key in the variable `key_env`; None if no server is named.

    Raises ConfigError if one of the two is missing.
    """
    if not url and not model and not key_env:
        return None
    if not url or not model:
        raise ConfigError("a judge is a server and the name of its model", "judge", "give both judge=URL and judge_model=NAME")
    from termrsi.interop.chat_endpoint import EndpointWriter

    return EndpointWriter(url, model, key_env=key_env)
