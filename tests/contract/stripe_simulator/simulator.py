"""A Stripe simulator of a test's own, as a process, spoken to over real HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

from sandbox.ports import free_port
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

START_WITHIN_S = 60.0
REPLY_WITHIN_S = 30.0
KEY = "sk_test_contract"
INTENTS = "/v1/payment_intents"
CHARGES = "/v1/charges"
FAULT_STATUS = {"http_500": 500, "http_429": 429, "lock_timeout": 429, "html_502": 502}
"""The kinds of faults that come as a whole reply, with its HTTP status."""
SHORT_S = 0.3
"""A delay, or a watch over something that must not happen."""
HELD_S = 60.0
"""What is held so long goes on when the test lets it go."""


@dataclass(frozen=True)
class Answer:
    """A reply as it came; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


def payment(customer: str = "cus_T1", **more: Any) -> dict[str, Any]:
    """The parameters of an off-session PaymentIntent, as a worker sends them."""
    return {
        "amount": 2500,
        "currency": "usd",
        "customer": customer,
        "confirm": "true",
        "off_session": "true",
        **more,
    }


class Simulator(Stripe):
    """The process and its API; the admin side is what every test of the product uses."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.state = folder / "state"
        self.log = folder / "log"
        self._http = urllib3.PoolManager(retries=False, timeout=REPLY_WITHIN_S, maxsize=16)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process on the same port and state, and waits until it answers."""
        command = [sys.executable, "-m", "sandbox.stripe_simulator"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--state", str(self.state)],
                stdout=log,
                stderr=log,
            )
        wait_until(self._healthy, START_WITHIN_S, "the simulator answers")
        return self.process

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.call("GET", "/_sim/health").json["ok"] is True
        except urllib3.exceptions.HTTPError:
            return False

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def call(
        self,
        method: str,
        path: str,
        form: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        api_key: str | None = KEY,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request; a GET's form goes into its query. Raises urllib3's HTTPError."""
        sent = dict(headers or {})
        if api_key is not None:
            sent["Authorization"] = f"Bearer {api_key}"
        if key is not None:
            sent["Idempotency-Key"] = key
        text = urlencode(form or {})
        url = self.base_url + path + (f"?{text}" if text and method == "GET" else "")
        body = None if method == "GET" else text
        reply = self._http.request(method, url, body=body, headers=sent)
        found = {name.lower(): value for name, value in reply.headers.items()}
        return Answer(reply.status, found, reply.data.decode())

    def create(self, form: Mapping[str, Any] | None = None, key: str | None = None) -> Answer:
        """POST /v1/payment_intents."""
        return self.call("POST", INTENTS, payment() if form is None else form, key=key)

    def get(self, path: str, **form: Any) -> Answer:
        """A GET that must work."""
        answer = self.call("GET", path, form)
        assert answer.status == 200, answer.text
        return answer

    def listed(self, customer: str = "cus_T1", path: str = INTENTS) -> list[dict[str, Any]]:
        """The customer's objects, newest first."""
        found: list[dict[str, Any]] = self.get(path, customer=customer, limit=100).json["data"]
        return found

    def in_background(self, form: Mapping[str, Any], key: str) -> Background:
        """Starts a create and waits until the simulator holds it back."""
        before = len(self.held())
        background = Background(self, form, key)
        wait_until(lambda: len(self.held()) > before, REPLY_WITHIN_S, "the create is held")
        return background

    def held(self) -> list[dict[str, Any]]:
        """The requests without a status: running, or ended without a reply."""
        return self.requests(status=None)


class Background:
    """A create in a thread of its own."""

    def __init__(self, simulator: Simulator, form: Mapping[str, Any], key: str) -> None:
        self._answer: Answer | None = None
        self._error: urllib3.exceptions.HTTPError | None = None
        self._create = (simulator, form, key)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            simulator, form, key = self._create
            self._answer = simulator.create(form, key)
        except urllib3.exceptions.HTTPError as error:
            self._error = error

    def answer(self) -> Answer:
        """The reply. Raises what the client saw in place of one."""
        self._thread.join(REPLY_WITHIN_S)
        assert not self._thread.is_alive(), "no reply"
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer


@contextmanager
def running_simulator(folder: Path) -> Iterator[Simulator]:
    """A simulator with an empty state, stopped at the end."""
    simulator = Simulator(folder)
    try:
        yield simulator
    finally:
        simulator.kill()
