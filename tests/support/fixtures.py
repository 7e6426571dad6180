"""The fixtures; tests/conftest.py makes them known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from models.database import make_engine
from models.ledger import Ledger
from models.settings import Settings, load_settings
from sandbox.processes import Processes
from sandbox.stack import create_channel, create_group
from tests.support.faults import FaultPoints
from tests.support.pipelines import Pipeline, SharedPipeline
from tests.support.roles import RoleStarter
from tests.support.services import Services, running_services
from tests.support.stripe import Stripe


@pytest.fixture(scope="session")
def session_services() -> Iterator[Services]:
    with running_services() as services:
        yield services


@pytest.fixture(scope="session")
def shared_pipeline(
    session_services: Services, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedPipeline]:
    shared = SharedPipeline(session_services, tmp_path_factory.mktemp("pipelines"))
    yield shared
    shared.end()


@pytest.fixture
def services(
    request: pytest.FixtureRequest,
    session_services: Services,
    shared_pipeline: SharedPipeline,
) -> Iterator[Services]:
    """The services; whatever the test does to them is mended afterwards."""
    if "pipeline" not in request.fixturenames:
        # Nobody else works on the machine of a test that does not want it.
        shared_pipeline.end()
    yield session_services
    session_services.heal()


@pytest.fixture
def database_url(services: Services) -> Iterator[str]:
    """A fresh, migrated database."""
    url = services.new_database()
    yield url
    services.heal()
    services.drop_database(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(load_settings({"DATABASE_URL": database_url}), pool_size=8, name="test")
    yield engine
    engine.dispose()


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    """A ledger with the fast limits."""
    return Ledger(engine, load_settings({"LIMITS": "fast"}).limits, "test")


@pytest.fixture
def redis_url(services: Services) -> str:
    """An empty Redis database for the stream."""
    return services.new_redis_database()


@pytest.fixture
def celery_broker_url(services: Services) -> str:
    """An empty Redis database for Celery."""
    return services.new_redis_database()


@pytest.fixture
def nsq_topic(services: Services) -> str:
    """A topic name that nobody has used."""
    services.need("nsqd")
    return f"billing-events-{services.number()}"


@pytest.fixture
def stripe(services: Services) -> Stripe:
    """A simulator without any past."""
    services.need("stripe")
    simulator = Stripe(services.stack.url("stripe"))
    simulator.reset()
    return simulator


@pytest.fixture
def fault_point(tmp_path: Path) -> FaultPoints:
    return FaultPoints(tmp_path / "faults")


@pytest.fixture
def environment(
    services: Services,
    database_url: str,
    redis_url: str,
    celery_broker_url: str,
    nsq_topic: str,
    stripe: Stripe,
    fault_point: FaultPoints,
) -> dict[str, str]:
    """The product's settings against this test's own services; channel and group exist."""
    settings = {
        **services.stack.settings,
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "CELERY_BROKER_URL": celery_broker_url,
        "NSQ_TOPIC": nsq_topic,
        "STRIPE_API_BASE": stripe.base_url,
        "FAULTS_DIR": str(fault_point.folder),
    }
    create_channel(settings)
    create_group(settings)
    return settings


@pytest.fixture
def settings(environment: dict[str, str]) -> Settings:
    """The same as the product reads them."""
    return load_settings(environment)


@pytest.fixture
def role(tmp_path: Path, environment: dict[str, str]) -> Iterator[RoleStarter]:
    """Starts processes of the product; all are killed afterwards."""
    folder = tmp_path / "roles"
    folder.mkdir()
    starter = RoleStarter(Processes(folder), folder, environment)
    yield starter
    starter.kill_all()


@pytest.fixture
def pipeline(
    request: pytest.FixtureRequest, services: Services, shared_pipeline: SharedPipeline
) -> Pipeline:
    """The whole product, running (see tests/support/pipelines.py).

    A module's PIPELINE_ENV adds to its settings.
    """
    env: dict[str, str] = getattr(request.module, "PIPELINE_ENV", {})
    return shared_pipeline.ready(env)


@pytest.fixture
def another_nsqd(services: Services) -> Callable[..., dict[str, str]]:
    """Starts one more nsqd with options of its own (`"--msg-timeout=2s"`); gives its settings."""
    return services.another_nsqd
