"""The certificate of a server."""

from __future__ import annotations

import ssl
from pathlib import Path


def server_context(certificate: str | Path | None, key: str | Path | None) -> ssl.SSLContext | None:
    """Return what a server needs for TLS 1.2 and newer; None without a certificate.

    Args:
        certificate: PEM file with the server's certificate, then the certificates between it and its authority.
        key: PEM file with the certificate's private key, without a password.

    Raises:
        ValueError: one of both is missing, cannot be read, or they do not belong together.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("a certificate needs its key: give both --certificate FILE and --key FILE, or none of them")
    for option, path in (("--certificate", certificate), ("--key", key)):
        if not Path(path).is_file():
            raise ValueError(f"{option}: there is no file {str(path)!r}; give the path of a PEM file")

    def refuse() -> str:
        raise ValueError(f"--key: {key} has a password; write the key without it: openssl pkey -in {key} -out NEW")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except OSError as error:
        known = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        reason = known or "one of them is no PEM file"
        raise ValueError(
            f"--certificate {certificate} and --key {key} cannot be used together ({reason}); give a certificate and "
            "its own key, both as PEM files"
        ) from None
    return context
