"""Models for roles, as they are configured: the plain form of an override, and one line for each thing that cannot be."""

from pathlib import Path

import pytest

from termrsi import setup
from termrsi.config import stages
from termrsi.config.choices import ROLES
from termrsi.config.load import load
from termrsi.config.schema import Config, RoleConfig
from termrsi.errors import ConfigError

BASE = ("experiment=rsr", "scale=dry")
PLANNER = ("roles.planner.url=http://127.0.0.1:8000/v1", "roles.planner.model=m")


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load((*BASE, *overrides))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_role_is_configured_like_any_other_key(plus: str) -> None:
    more = ("roles.planner.price_in=2.5", "roles.planner.extra.top_k=3", "roles.planner.extra.seed=null", "roles.critic.model=c")
    roles = load((*BASE, *(plus + o for o in (*PLANNER, *more)), "roles.critic.url=https://h/v1")).roles
    extra = {"top_k": 3, "seed": None}
    assert roles["planner"] == RoleConfig(url="http://127.0.0.1:8000/v1", model="m", price_in=2.5, extra=extra)
    assert roles["critic"] == RoleConfig(url="https://h/v1", model="c")
    assert load(BASE).roles == {}


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("roles.planer.url=http://h", "roles.planer.model=m"), "unknown role 'planer'; nearest: planner"),
        (("roles.xyz.url=http://h", "roles.xyz.model=m"), "valid: solver, planner, critic, teacher, judge, author"),
        (("roles.judge.url=http://h", "roles.judge.model=m"), "no stage of this pipeline has that role; valid here: solver"),
        ((*PLANNER, "roles.planner.ulr=http://h"), "nearest valid key: roles.planner.url"),
        (PLANNER[:1], "roles.planner.model has no value"),
        (PLANNER[1:], "roles.planner.url has no value"),
        ((*PLANNER, "roles.planner.model=''"), "roles.planner.model: is empty"),
        ((*PLANNER, "roles.planner.retries=many"), "retries"),
        ((*PLANNER, "roles.planner.retries=-1"), "retries=-1"),
        ((*PLANNER, "roles.planner.concurrency=0"), "concurrency=0"),
        ((*PLANNER, "roles.planner.price_out=-1"), "price_out=-1"),
        ((*PLANNER, "roles.planner.timeout_s=0"), "timeout_s=0"),
        ((*PLANNER, "roles.planner.extra.model=x"), "'model' is not free"),
        (("roles.planner=3",), "planner"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], part: str) -> None:
    assert part in str(refusal(*overrides))


@pytest.mark.parametrize(
    ("experiment", "role", "off", "on"),
    [
        ("reterm", "judge", "stages.recovery.judge=false", "stages.recovery.judge=true"),
        ("river", "judge", "stages.audit.judge=false", "stages.audit.judge=true"),
        ("tmax", "author", "stages.synthesise.author=procedural", "stages.synthesise.author=policy"),
    ],
)
def test_a_role_that_its_stage_does_not_ask_is_refused(experiment: str, role: str, off: str, on: str) -> None:
    words = (f"experiment={experiment}", "scale=node", f"roles.{role}.url=http://h/v1", f"roles.{role}.model=m")
    with pytest.raises(ConfigError) as caught:
        load((*words, off))
    assert (caught.value.where, on in caught.value.valid) == (f"roles.{role}", True)
    assert role in load((*words, on)).roles


@pytest.mark.parametrize("url", ["ftp://h", "h:8000", "http://", "http://h:port/v1", "/v1", "", "http://h:99999"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    error = refusal(PLANNER[1], f"roles.planner.url='{url}'")
    assert (error.where, "URL" in error.what) == ("roles.planner.url", True)


@pytest.mark.parametrize("override", ["url=http://me:sk-abc@h/v1", "url=http://h/v1?key=sk-abc", "key_env=sk-abc", "key=sk-abc"])
def test_a_key_in_the_configuration_is_refused_and_not_told(override: str) -> None:
    assert "sk-abc" not in str(refusal(*PLANNER, f"roles.planner.{override}"))


async def test_a_key_that_is_not_there_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config: Config = load((*BASE, *PLANNER, "roles.planner.key_env=NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match=r"roles\.planner\.key_env: the environment variable NO_SUCH_KEY is not set"):
        await setup.preflight(config, tmp_path / "run", print)
    monkeypatch.setenv("NO_SUCH_KEY", "there")
    await setup.preflight(config, tmp_path / "run", print)


@pytest.mark.parametrize(("harness", "refused"), [("fewshot", True), ("react", False)])
async def test_a_workflow_that_no_prompt_holds_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness: str, refused: bool
) -> None:
    monkeypatch.setenv("TERMRSI_CACHE", str(tmp_path / "cache"))
    words = ("experiment=reterm", "scale=dry", f"stages.recovery.teacher_harness={harness}", "stages.recovery.workflow=short")
    if refused:
        with pytest.raises(ConfigError, match=r"stages\.recovery\.workflow: workflow=short has no effect: 'fewshot'"):
            await setup.preflight(load(words), tmp_path / "run", print)
        words = (*words[:-1], "stages.recovery.workflow=full")
    await setup.preflight(load(words), tmp_path / "run", print)


def test_every_kind_of_stage_says_which_roles_it_has() -> None:
    assert set(stages.PLAYS) == set(stages.STAGES)
    assert {role for roles in stages.PLAYS.values() for role in roles} <= set(ROLES)
