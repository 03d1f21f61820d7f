"""The oracle of each model, loaded once."""

from collections.abc import Callable
from functools import lru_cache

import pytest
from oracle import Oracle

from tests.conftest import path_of


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Oracle]:
    """Gives the oracle of a model by the model's name."""
    return lru_cache(lambda name: Oracle(path_of(name)))
