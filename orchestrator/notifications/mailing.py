"""Mailing: one e-mail over SMTP, encrypted unless the settings turn that off."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from email.policy import SMTP

from orc.orchestrator.notifications.posting import STEP_S, Undelivered
from orc.orchestrator.notifications.targets import Target, Undeliverable


def send_mail(target: Target, message: EmailMessage) -> None:
    """Send *message*. Raises `Undelivered`, or `Undeliverable` where it makes no sense to try again."""
    mail = target.mail
    if mail is None:
        raise ValueError("a target of e-mail has a server")
    context = ssl.create_default_context()
    try:
        if mail.tls == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(mail.host, mail.port, timeout=STEP_S, context=context)
        else:
            server = smtplib.SMTP(mail.host, mail.port, timeout=STEP_S)
        with server:
            if mail.tls == "starttls":
                server.starttls(context=context)  # raises where the server does not offer it
            if mail.user:
                server.login(mail.user, target.password)
            # One transaction for all of them: it is taken for all or for none, so a second try sends nobody two.
            _send(server, message, mail.sender, target.to)
    except smtplib.SMTPResponseException as error:
        text = error.smtp_error.decode("utf-8", "replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        why = target.masked(f"{mail.host} answered {error.smtp_code} {text}")
        if 500 <= error.smtp_code < 600:
            raise Undeliverable(why) from None
        raise Undelivered(why) from None
    except (smtplib.SMTPException, OSError) as error:
        raise Undelivered(target.masked(f"{mail.host}: {type(error).__name__}: {error}")) from None


def _send(server: smtplib.SMTP, message: EmailMessage, sender: str, to: tuple[str, ...]) -> None:
    server.ehlo_or_helo_if_needed()
    code, text = server.mail(sender)
    for address in to if code == 250 else ():
        code, text = server.rcpt(address)
        if code not in (250, 251):
            break
    if code not in (250, 251):
        server.rset()
        raise smtplib.SMTPResponseException(code, text)
    code, text = server.data(message.as_bytes(policy=SMTP))
    if code != 250:
        raise smtplib.SMTPResponseException(code, text)
