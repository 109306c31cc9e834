"""How many keys the configuration has: one more needs a user who sets it, and another one that goes."""

import pytest

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.config.wording import GONE, all_keys

MOST = 154


def leaves() -> list[str]:
    """Every key that holds a value."""
    every = list(all_keys(Config))
    return [key for key in every if not any(other.startswith(f"{key}.") for other in every)]


def test_there_are_no_more_keys() -> None:
    assert len(leaves()) <= MOST


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_says_what_stands_in_its_place(key: str) -> None:
    assert key not in leaves()
    with pytest.raises(ConfigError) as refused:
        parse_config({}, [f"{key}=1"])
    gone = f"{key}=1: this key is gone; leave it out: {GONE[key]}"
    assert str(refused.value) == f"override '{key}=1': {gone}"
