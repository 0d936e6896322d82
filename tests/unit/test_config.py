"""RunnerConfig: plain values, read from the environment where they are not given."""

from __future__ import annotations

from typing import Any

import pytest

from graphglue import ConfigError, GraphGlueError, Mode, RunnerConfig


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in RunnerConfig.model_fields:
        monkeypatch.delenv(f"GRAPHGLUE_{field.upper()}", raising=False)


def test_defaults() -> None:
    config = RunnerConfig()
    assert (config.enabled, config.padding, config.waste_limit, config.generic_glue) == (True, True, None, False)
    assert (config.glue, config.certificate, config.clone_outputs, config.max_requests) == ({}, "off", False, None)
    assert config.warmups >= 1


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("GRAPHGLUE_ENABLED", "0", "enabled", False),
        ("GRAPHGLUE_ENABLED", "false", "enabled", False),
        ("GRAPHGLUE_ENABLED", "1", "enabled", True),
        ("GRAPHGLUE_PADDING", "off", "padding", False),
        ("GRAPHGLUE_WASTE_LIMIT", "2.5", "waste_limit", 2.5),
        ("GRAPHGLUE_GENERIC_GLUE", "yes", "generic_glue", True),
        ("GRAPHGLUE_CERTIFICATE", "require", "certificate", "require"),
        ("GRAPHGLUE_CLONE_OUTPUTS", "true", "clone_outputs", True),
        ("GRAPHGLUE_WARMUPS", "3", "warmups", 3),
    ],
)
def test_the_environment_fills_in(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str, value: Any
) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(RunnerConfig(), field) == value


def test_what_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHGLUE_ENABLED", "0")
    monkeypatch.setenv("GRAPHGLUE_WARMUPS", "9")
    config = RunnerConfig(enabled=True)
    assert (config.enabled, config.warmups) == (True, 9)


def test_other_variables_of_the_prefix_are_nobody_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHGLUE_REQUIRE_GPU", "1")
    assert RunnerConfig() == RunnerConfig()


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("GRAPHGLUE_ENABLED", "perhaps", "enabled"),
        ("GRAPHGLUE_WASTE_LIMIT", "0.5", "waste_limit"),
        ("GRAPHGLUE_WARMUPS", "many", "warmups"),
        ("GRAPHGLUE_CERTIFICATE", "strict", "certificate"),
    ],
)
def test_an_unusable_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"RunnerConfig is not usable: {field}: "):
        RunnerConfig()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pading": False}, r"RunnerConfig is not usable: pading: .*; known are \['.*'padding'.*\]"),
        ({"Enabled": True}, "Enabled: "),
        ({"waste_limit": 0.9}, "waste_limit: .*greater than or equal to 1"),
        ({"waste_limit": "wide"}, "waste_limit: "),
        ({"max_requests": 0}, "max_requests: .*greater than or equal to 1"),
        ({"warmups": 0}, "warmups: .*greater than or equal to 1"),
        ({"glue": {"p": "sometimes"}}, "glue.p: .*'on', 'unpadded' or 'off'"),
        ({"glue": "off"}, "glue: "),
        ({"certificate": "maybe"}, "certificate: .*'off', 'warn' or 'require'"),
        ({"enabled": "perhaps"}, "enabled: "),
        ({"modes": {"dance"}}, "modes"),
        ({"padding": None, "warmups": -1}, "padding: .*; warmups: "),
    ],
)
def test_unknown_keys_and_values_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        RunnerConfig(**fields)
    assert isinstance(caught.value, GraphGlueError)


def test_a_config_is_frozen() -> None:
    config = RunnerConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.padding = False  # type: ignore[misc]
    assert config.padding


@pytest.mark.parametrize("mode", list(Mode))
def test_padding_is_wasteful_beyond_twice_the_tokens_in_extend_only(mode: Mode) -> None:
    assert RunnerConfig().waste_limit_in(mode) == (2.0 if mode is Mode.EXTEND else 0.0)
    assert RunnerConfig(waste_limit=3).waste_limit_in(mode) == 3.0


def test_modes_are_enums() -> None:
    assert RunnerConfig(modes={"decode", Mode.DRAFT}).modes == {Mode.DECODE, Mode.DRAFT}  # type: ignore[arg-type]
