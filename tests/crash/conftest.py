"""All crash tests of one pytest process share a pipeline: what they kill is started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pipelines import SharedPipeline
from tests.support.services import Services


@pytest.fixture(scope="package")
def shared_pipeline(
    session_services: Services, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedPipeline]:
    shared = SharedPipeline(session_services, tmp_path_factory.mktemp("pipeline"))
    yield shared
    shared.end()
