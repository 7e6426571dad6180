"""What an nsqd may ask of those who connect: a certificate, a secret."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PERMISSIONS = ["subscribe", "publish"]


class Authority:
    """Answers nsqd's question whom to let in: whoever has the secret, to the topics named."""

    def __init__(self) -> None:
        self.secret = "open-sesame"
        self.topic = ".*"
        """A regular expression, as nsqd reads it."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = parse_qs(urlsplit(self.path).query)
                owner.answer(self, asked.get("secret", [""])[0])

            def log_message(self, *_arguments: object) -> None:
                """Nothing to say."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, secret: str) -> None:
        allowed = {"topic": self.topic, "channels": [".*"], "permissions": PERMISSIONS}
        body = {"ttl": 3600, "identity": "a bridge", "authorizations": [allowed]}
        handler.send_response(200 if secret == self.secret else 403)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(json.dumps(body).encode())


@pytest.fixture
def authority() -> Iterator[Authority]:
    """The HTTP server of `nsqd --auth-http-address`."""
    authority = Authority()
    yield authority
    authority.server.shutdown()
    authority.server.server_close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that is its own authority; the key lies beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test nsqd")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    path = tmp_path / "nsqd.pem"
    path.write_bytes(built.public_bytes(pem))
    path.with_suffix(".key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path
