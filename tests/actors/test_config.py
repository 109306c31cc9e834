"""The configuration as a user writes it: what YAML makes of it, and where its paths begin."""

from pathlib import Path

import pytest

from braid.actors.config import Config, ConfigError, load_config


def written(folder: Path, text: str, *overrides: str) -> Config:
    """A configuration file with this text."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_words_and_dates_are_text(tmp_path: Path) -> None:
    text = "name: 2026-11-23\ntelemetry: {wandb: off, progress: no}\ntrain: {lr: 1e-3}"
    config = written(tmp_path, text)
    assert (config.name, config.telemetry.wandb, config.train.lr) == ("2026-11-23", "off", 1e-3)
    assert config.telemetry.progress is False
    config = written(tmp_path, "", "telemetry.wandb=off", "name=2026-11-24", "train.steps=1e3")
    assert (config.name, config.telemetry.wandb, config.train.steps) == ("2026-11-24", "off", 1000)
    (tmp_path / "again.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml").to_yaml() == config.to_yaml()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: 123", 'name=123: must be text; write it in quotes: "123", or --set \'name="123"\''),
        ("name: 1.5", '"1.5"'),
        ("name: true", '"true"'),
        ("runs: 2026", '"2026"'),
    ],
)
def test_numbers_that_should_be_text(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        written(tmp_path, text)
    assert says in str(refused.value)
    key, _, value = text.partition(": ")
    assert str(getattr(written(tmp_path, f'{key}: "{value}"'), key)) == value
    assert str(getattr(written(tmp_path, "", f'{key}="{value}"'), key)) == value
