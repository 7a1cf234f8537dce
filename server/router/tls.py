"""TLS on both sides of the router: what it shows its clients, and whom it trusts and shows among engines."""

from __future__ import annotations

import logging
import os
import ssl
from typing import TYPE_CHECKING

from bidikv_server.router.files import Watch
from bidikv_server.router.settings import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from bidikv_server.router.settings import RouterSettings

_log = logging.getLogger(__name__)


class Identity:
    """A certificate with its key in a TLS context, read again when a file changes.

    Connections that are open keep the certificate they began with.
    """

    def __init__(self, context: ssl.SSLContext, setting: str, cert: Path, key: Path | None) -> None:
        """Read both for the first time.

        Args:
            context: Where they go.
            setting: Name of the setting that names the certificate.
            cert: PEM file with the certificate and its chain, and the key if `key` is None.
            key: PEM file with the key, not encrypted.

        Raises:
            SettingsError: They cannot be used.
        """
        self._context = context
        self._setting = setting
        self._files = cert, key
        self._watch = Watch(*(path for path in (cert, key) if path is not None))
        try:
            _load(context, cert, key)
        except ValueError as error:
            raise SettingsError(f"{setting}: {error}") from None

    def read_again(self) -> None:
        """Take a changed certificate for new connections; one that cannot be used is a line in the log."""
        if not self._watch.changed():
            return
        try:
            # Into a context of its own first: half a pair would break the one that serves.
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._files)
            _load(self._context, *self._files)
        except ValueError as error:
            _log.warning("%s changed and cannot be used, the earlier one stays: %s", self._setting, error)
        else:
            _log.info("%s was read again", self._setting)


def _load(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Read a certificate and its key.

    Raises:
        ValueError: They cannot be used; the message names the file.
    """
    for path in (cert, key):
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"cannot read {path}")
    try:
        # An empty password: without one, OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        shown = f"{cert} and {key}" if key is not None else str(cert)
        raise ValueError(
            f"{shown}: {_reason(error)} (a PEM certificate and its key without a password)"
        ) from None


def _trust(context: ssl.SSLContext, setting: str, authorities: Path) -> None:
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise SettingsError(
            f"{setting}: {authorities}: {_reason(error)} (a PEM file of certificates)"
        ) from None
    except OSError as error:
        raise SettingsError(f"{setting}: cannot read {authorities}: {error.strerror}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return "not usable"


def serving(settings: RouterSettings) -> tuple[ssl.SSLContext, Identity] | None:
    """How the router speaks to its clients; None is plain HTTP.

    Raises:
        SettingsError: A file cannot be used.
    """
    if settings.tls_cert_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if settings.tls_client_ca_file is not None:
        _trust(context, "tls_client_ca_file", settings.tls_client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context, Identity(context, "tls_cert_file", settings.tls_cert_file, settings.tls_key_file)


def upstream(settings: RouterSettings) -> tuple[ssl.SSLContext, Identity | None]:
    """How the router speaks to engines whose URL is https.

    Raises:
        SettingsError: A file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.upstream_ca_file is not None:
        _trust(context, "upstream_ca_file", settings.upstream_ca_file)
    elif settings.upstream_verify:
        context.load_default_certs()
    if not settings.upstream_verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _log.warning("upstream_verify is off: engines with TLS are not asked who they are")
    if settings.upstream_cert_file is None:
        return context, None
    return context, Identity(
        context, "upstream_cert_file", settings.upstream_cert_file, settings.upstream_key_file
    )
