"""Where a judge comes from: nowhere, if no server is named."""

import pytest

from termrsi.errors import ConfigError
from termrsi.judge import judge_of


def test_no_server_is_no_judge() -> None:
    assert judge_of("", "") is None


@pytest.mark.parametrize("given", [("http://x/v1", "", ""), ("", "m", ""), ("", "", "KEY")])
def test_half_a_judge_is_refused(given: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match="judge_model=NAME"):
        judge_of(*given)
