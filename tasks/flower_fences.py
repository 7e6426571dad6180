"""What Flower must not show and must not do.

Flower prints task arguments in several places and lets one click revoke a task or enqueue any
name. Here arguments are cut out of everything at the way in (task events, worker inspection),
so that pages, search, API and state file never hold them, and the requests that could lose or
double a charge are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import tornado.web
from flower.api import BaseApiHandler
from flower.api.tasks import TaskAsyncApply
from flower.events import EventsState
from flower.inspector import Inspector
from flower.urls import handlers
from flower.views.monitor import Metrics

HIDDEN: Final = "(hidden)"
CONTROL_QUEUE: Final = "control"
APPLICABLE: Final = frozenset({"tasks.recharge"})
"""Tasks that may be enqueued through Flower's API; their arguments carry ids only."""

_SAFE: Final = {
    "args": re.compile(r"\(('[0-9a-f]{32}',)?\)"),
    "kwargs": re.compile(r"\{('source': '(nsq|redis|sweep|replay|recharge)')?\}"),
    "result": re.compile(r"'([0-9a-f]{32} [a-z_:]+|published \d+)'"),
    "exception": re.compile(r"(ChargeFailed|SweepFailed)\('[0-9a-z_ ]+'\)"),
}
"""What our own tasks show on purpose: charge keys, sources and words of ours."""
_ALWAYS_HIDDEN: Final = ("traceback",)


def redacted(name: str, value: object) -> object:
    """The value of a task's field as it may be seen; anything that is not known is hidden."""
    if value is None or value == "":
        return value
    if name in _ALWAYS_HIDDEN:
        return HIDDEN
    pattern = _SAFE.get(name)
    if pattern is None:
        return value
    return value if isinstance(value, str) and pattern.fullmatch(value) else HIDDEN


def redact_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """A task event without what it must not carry further."""
    return {name: redacted(name, value) for name, value in event.items()}


def redact_inspected(value: object) -> object:
    """A worker's answer to an inspection without the arguments of its tasks."""
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if name in ("args", "kwargs") else redact_inspected(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_inspected(inner) for inner in value]
    return value


def format_task(task: Any) -> Any:
    """Flower's own hook for its task pages. Whatever goes wrong, nothing is shown."""
    for name in (*_SAFE, *_ALWAYS_HIDDEN):
        try:
            seen = redacted(name, getattr(task, name, None))
        except Exception:  # Flower would show the task as it is.
            seen = HIDDEN
        setattr(task, name, seen)
    return task


class Fenced(BaseApiHandler):
    """Refuses what is behind it: 403, after the credentials were checked."""

    @tornado.web.authenticated
    def get(self, *_: str) -> NoReturn:
        """Refused."""
        raise tornado.web.HTTPError(403, "not offered here; `celery -A tasks ledger` tells more")

    post = get


class FencedMetrics(Metrics):
    """Flower's metrics, for those with credentials."""

    @tornado.web.authenticated
    async def get(self) -> None:
        """The metrics in Prometheus's format."""
        await super().get()


class FencedAsyncApply(TaskAsyncApply):
    """Enqueues what is meant to be enqueued by hand, on its own queue, and nothing else."""

    @tornado.web.authenticated
    async def post(self, taskname: str) -> None:
        """Enqueue a task that is applicable; 403 for any other."""
        if taskname not in APPLICABLE:
            raise tornado.web.HTTPError(403, "this task is not enqueued by hand")
        await super().post(taskname)

    def get_task_args(self) -> tuple[Any, Any, dict[str, Any]]:
        """Arguments as given; of the options the task id alone."""
        args, kwargs, options = super().get_task_args()
        kept = {name: options[name] for name in ("task_id",) if name in options}
        hidden = {"argsrepr": HIDDEN, "kwargsrepr": HIDDEN}
        return args, kwargs, {**kept, **hidden, "queue": CONTROL_QUEUE}


_FENCES: Final[tuple[tuple[str, type[tornado.web.RequestHandler]], ...]] = (
    (r"/api/tasks", Fenced),
    (r"/api/task/(info|result|apply|send-task|abort|revoke|timeout|rate-limit)(?:/.*)?", Fenced),
    (r"/api/worker/pool/(?:restart|shrink|autoscale)/.*", Fenced),
    (r"/api/worker/queue/cancel-consumer/.*", Fenced),
    (r"/api/task/async-apply/(.+)", FencedAsyncApply),
    (r"/metrics", FencedMetrics),
)


class _Installed:
    done = False


def installed() -> bool:
    """Whether this process's Flower is fenced."""
    return _Installed.done


def install() -> None:
    """Fence this process's Flower. Once, before its application is built."""
    if _Installed.done:
        return
    for fence in reversed(_FENCES):
        handlers.insert(0, fence)
    _redact_at_the_way_in()
    _Installed.done = True


def _redact_at_the_way_in() -> None:
    take_event, take_answer = EventsState.event, Inspector._on_update

    def event(self: EventsState, event: Mapping[str, Any]) -> None:
        take_event(self, redact_event(event))

    def on_update(self: Inspector, workername: str, method: str, response: Any) -> None:
        if method in self.task_inspect_methods:
            response = redact_inspected(response)
        take_answer(self, workername, method, response)

    EventsState.event = event
    Inspector._on_update = on_update
