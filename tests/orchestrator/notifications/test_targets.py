"""Who is told, in which form: addresses, settings, signatures, Slack, e-mail."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from hypothesis import given, settings
from hypothesis import strategies as st

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.notifications import delivery
from orc.orchestrator.notifications.delivery import send
from orc.orchestrator.notifications.sending import Undelivered, _pinned, is_public, post
from orc.orchestrator.notifications.targets import Policy, Settings, Undeliverable, load_settings, shown, target_of

PAGE = (Path(__file__).parents[3] / "docs/how-to/notifications.md").read_text()
PAYLOAD = {
    "event": "failure",
    "job": "digits-k3f9a2",
    "name": "digits",
    "cluster": "gpu",
    "attempt": 2,
    "state": "FAILED",
    "reason": "rank 0 exited 3",
}


def known(names):
    return {name: f"value of {name}" for name in names}


def block(language: str, index: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[index]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_documented_settings_are_settings(tmp_path):
    (tmp_path / "notifications.yaml").write_text(block("yaml", 1))
    found = load_settings(tmp_path / "notifications.yaml")
    assert set(found.targets) == {"team", "ci", "me"}
    assert found.mail
    assert found.mail.sender == "orc@example.org"


def test_the_documented_verification_takes_what_is_sent_and_nothing_else(web, settings):
    given = settings(targets={"ci": {"url": web.url, "key": "${secret:CI_KEY}"}})
    send(target_of("ci", given, Policy(), known), dict(PAYLOAD), "digits-1-abc", time.time())
    ((headers, body),) = web.requests
    names: dict[str, Any] = {}
    exec(block("python"), names)
    verified = names["verified"]
    assert verified(b"value of CI_KEY", headers, body)
    assert not verified(b"another", headers, body)
    assert not verified(b"value of CI_KEY", headers, body + b" ")
    assert not verified(b"value of CI_KEY", {**headers, "webhook-id": "other"}, body)
    old = {**headers, "webhook-timestamp": str(int(time.time()) - 3600)}
    assert not verified(b"value of CI_KEY", old, body)
    told = json.loads(body)
    assert set(json.loads(block("json"))) >= set(told)
    assert told["text"] == "digits-k3f9a2 has failed on gpu: rank 0 exited 3"


def test_a_key_of_standard_webhooks_is_taken_as_their_libraries_do():
    # The example of the specification's own test vectors.
    key, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    assert delivery.signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == (
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_nothing_of_a_job_is_markup_in_slack():
    hostile = {**PAYLOAD, "job": "<!channel>", "reason": "*bold* <https://evil.example|click> & more"}
    text = json.loads(delivery.slack_body(hostile))["text"]
    assert "<" not in text
    assert "*bold*" not in text
    assert "&lt;!channel&gt;" in text


@dataclass
class Mailbox:
    """A real SMTP server, and what it took."""

    port: int = 0
    messages: list[Any] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    logins: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def handle_RCPT(self, _server, _session, envelope, address, _options):
        if address in self.refuses:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server, _session, envelope):
        self.messages.append(envelope)
        return "250 OK"


@pytest.fixture
def mailbox(server_context) -> Iterator[Mailbox]:
    box = Mailbox()

    def authenticate(_server, _session, _envelope, _mechanism, data):
        box.logins.append((data.login, data.password))
        return AuthResult(success=data.password == b"value of SMTP_PASSWORD", handled=False)

    server = Controller(
        box,
        hostname="127.0.0.1",
        port=free_port(),
        ready_timeout=60,
        tls_context=server_context,
        require_starttls=True,
        authenticator=authenticate,
        auth_required=True,
    )
    server.start()
    box.port = server.port
    yield box
    server.stop()


@pytest.fixture
def post_office(mailbox: Mailbox, settings):
    def of(**changed: Any) -> Settings:
        mail = {
            "host": "localhost",
            "port": mailbox.port,
            "from": "orc@example.org",
            "user": "orc",
            "password": "${secret:SMTP_PASSWORD}",
            **changed,
        }
        return settings(mail=mail, targets={"us": {"kind": "email", "to": ["a@example.org", "b@example.org"]}})

    return of


def test_an_e_mail_goes_encrypted_with_a_login_and_has_the_id_of_its_notification(mailbox, post_office):
    send(target_of("us", post_office(), Policy(), known), dict(PAYLOAD), "digits-1-abc", 1.0)
    (envelope,) = mailbox.messages
    assert envelope.rcpt_tos == ["a@example.org", "b@example.org"]
    text = envelope.content.decode()
    assert "Subject: [orc] digits-k3f9a2 has failed on gpu: rank 0 exited 3\n" in text.replace("\r\n", "\n")
    assert "Message-ID: <digits-1-abc@orc.invalid>" in text
    assert "rank 0 exited 3" in text
    assert mailbox.logins == [(b"orc", b"value of SMTP_PASSWORD")]


def test_a_name_adds_no_header_to_an_e_mail(mailbox, post_office):
    hostile = {**PAYLOAD, "job": "x\r\nBcc: victim@example.org\r\n\r\nbody"}
    send(target_of("us", post_office(), Policy(), known), hostile, "x-1-abc", 1.0)
    (envelope,) = mailbox.messages
    headers = envelope.content.decode().partition("\r\n\r\n")[0]
    assert not re.search(r"^Bcc:", headers, re.MULTILINE)
    assert envelope.rcpt_tos == ["a@example.org", "b@example.org"]


def test_an_e_mail_that_one_of_its_readers_cannot_get_goes_to_nobody(mailbox, post_office):
    mailbox.refuses = {"b@example.org"}
    with pytest.raises(Undeliverable, match="550"):
        send(target_of("us", post_office(), Policy(), known), dict(PAYLOAD), "digits-1-abc", 1.0)
    assert mailbox.messages == []


def test_a_wrong_password_is_refused_and_not_shown(mailbox, post_office):
    wrong = target_of("us", post_office(), Policy(), lambda names: dict.fromkeys(names, "hunter22"))
    with pytest.raises(Undeliverable) as refused:
        send(wrong, dict(PAYLOAD), "digits-1-abc", 1.0)
    assert "535" in str(refused.value)
    assert "hunter22" not in str(refused.value)


def test_no_password_goes_to_a_server_that_does_not_encrypt(settings):
    server = Controller(Mailbox(), hostname="127.0.0.1", port=free_port(), ready_timeout=60)
    server.start()
    try:
        mail = {
            "host": "127.0.0.1",
            "port": server.port,
            "from": "orc@example.org",
            "user": "orc",
            "password": "${secret:P}",
        }
        given = settings(mail=mail)
        with pytest.raises(Undelivered, match="STARTTLS"):
            send(target_of("email:me@example.org", given, Policy(), known), dict(PAYLOAD), "d-1-a", 1.0)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"targets": {"x": {"kind": "email", "url": "https://a.example/"}}}, "email"),
        ({"targets": {"x": {"kind": "slack"}}}, "url"),
        ({"targets": {"x": {"url": "https://a.example/", "key": "plain text"}}}, "secret"),
        ({"targets": {"x": {"kind": "email", "to": "a@example.org\nBcc: b@example.org"}}}, "e-mail"),
        ({"mail": {"host": "h", "from": "a@example.org", "user": "u", "password": "p"}}, "secret"),
        ({"mail": {"host": "h", "from": "a@b.c", "tls": "none", "user": "u", "password": "${secret:P}"}}, "encrypt"),
        ({"targtes": {}}, "targets"),
    ],
)
def test_settings_that_are_wrong_are_refused_with_their_place(write_settings, sections, why):
    with pytest.raises(SpecError, match=why) as refused:
        write_settings(**sections)
    assert "notifications.yaml:" in str(refused.value)


def test_a_job_that_names_no_target_is_refused_before_anything_is_sent(client, job_file, write_settings, backend):
    write_settings(targets={"team": {"url": "https://example.org/x"}})
    with pytest.raises(LaunchError, match="did you mean 'team'"):
        client.submit(job_file(notify=["taem"]))
    assert client.jobs() == []


def test_the_settings_subscribe_every_job(client, job_file, write_settings):
    write_settings(targets={"team": {"url": "https://example.org/x"}}, always=[{"to": "team", "on": "failure"}])
    job = client.submit(job_file(notify=[{"to": "team", "on": "start"}, "https://other.example/"]))
    assert job.spec["notify"] == [
        {"to": "team", "on": ["start", "failure"]},
        {"to": "https://other.example/", "on": ["end"]},
    ]


@pytest.mark.parametrize(
    "to",
    [
        "https://hooks.slack.com/services/T0/B0/x",
        "https://me:password@example.org/",
        "email:me@example.org,you@example.org",
        "email:me@example.org\nBcc: you@example.org",
        "ftp://example.org/",
        "https://example.org/\x1b[2J",
        "file:///etc/passwd",
        "https://" + "a" * 300,
    ],
)
def test_an_address_that_must_not_be_in_a_job_file_is_refused(job_file, to):
    with pytest.raises(SpecError):
        job_file(notify=[to])


def test_of_a_url_no_more_than_the_host_is_shown():
    assert "token" not in shown("https://example.org:8443/token?token=1")
    assert shown("https://example.org:8443/token").startswith("webhook:https://example.org:8443/")
    assert shown("https://example.org/a") != shown("https://example.org/b")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::a01:203", False),
        ("2002:a01:203::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("224.0.0.1", False),
        ("192.0.2.1", False),
        ("rubbish", False),
    ],
)
def test_public_addresses_are_told_from_others(address, public):
    assert is_public(address) is public


def inside(network: str) -> st.SearchStrategy[str]:
    return st.ip_addresses(network=network).map(str)


NOT_PUBLIC = st.one_of(
    *(inside(one) for one in ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")),
    *(inside(one) for one in ("0.0.0.0/8", "100.64.0.0/10", "224.0.0.0/4", "fc00::/7", "fe80::/10", "ff00::/8")),
    st.just("::1"),
)
WRAPPED = (
    lambda four: f"::ffff:{four}",
    lambda four: f"64:ff9b::{four}",
    lambda four: "2002:{:02x}{:02x}:{:02x}{:02x}::1".format(*map(int, four.split("."))),
)
PUBLIC = st.sampled_from(["93.184.216.34", "1.1.1.1", "2606:2800:220:1::1"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(PUBLIC, max_size=2), NOT_PUBLIC, st.lists(PUBLIC, max_size=1), st.sampled_from((str, *WRAPPED)))
def test_a_name_that_leads_inside_among_others_is_not_posted_to(before, private, after, wrapped):
    """Whatever the form of the private address, wherever it stands in the answer."""
    address = wrapped(private) if "." in private else private
    addresses = [*before, address, *after]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 443)) for one in addresses]
    target = target_of("webhook:https://hooks.example.org/x", Settings(), Policy(service=True), known)
    with mock.patch.object(socket, "getaddrinfo", return_value=found), mock.patch("httpx.Client.stream") as sent:
        with pytest.raises(Undeliverable, match="is at no public address"):
            post(target, b"{}", {})
        assert not sent.called


def test_a_missing_library_leaves_the_delivery_to_a_process_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    target = target_of("webhook:https://hooks.example.org/x", Settings(), Policy(), known)
    with pytest.raises(Undelivered, match=r"httpx, which is not installed here: pip install 'orc-launch\[client\]'"):
        post(target, b"{}", {})


@pytest.mark.parametrize("first", ["93.184.216.34", "2606:2800:220:1::1"])
def test_what_is_posted_to_is_the_address_that_was_looked_at(first):
    """A second answer of the name server, for the connection itself, plays no part."""
    answers = iter([[(socket.AF_INET, socket.SOCK_STREAM, 6, "", (first, 8443))]])
    target = target_of("webhook:https://hooks.example.org:8443/x", Settings(), Policy(service=True), known)
    with mock.patch.object(socket, "getaddrinfo", side_effect=lambda *_, **__: next(answers)):
        url, headers, name = _pinned(target)
    assert urlsplit(url).hostname == first
    assert (headers, name) == ({"host": "hooks.example.org:8443"}, "hooks.example.org")
