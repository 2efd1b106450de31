"""Encrypted connections: TLS 1.3 with one certificate per job, which both ends show and insist on.

The launcher (or the key file) has given that certificate and its private key to the processes of the job
only. So there is no authority to ask and no name to check: the other end must show this very certificate, and
prove in the handshake that it has the private key. The handshake of :mod:`ringcomm.wire.auth` follows inside,
and covers the certificate's fingerprint.

TLS here works on memory, not on the socket: this module moves the bytes between the two. So it can limit how
many bytes an unauthenticated peer sends, and sees which bytes are buffered.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import ssl
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Tuple

from ..errors import AuthenticationError, ConfigError, ProtocolError
from ..wire.auth import MAGIC, UNENCRYPTED, plain_answer
from .base import clipped, flat
from .reactor import ClosedEarly, Encryption, SecureSocket

UNAUTHENTICATED_BYTES = 8 * 1024
"""Limit of bytes that a connection may send unauthenticated. A handshake takes two to three thousand."""
_BATCH_BYTES = 256 * 1024
"""Bytes that are encrypted, and sent, at once."""
_HEAD_BYTES = 16
"""First bytes kept until the other end is trusted: more than the head of a refusal."""
_STAGING_BYTES = 16 * 1024
_MAX_STAGING_BYTES = 256 * 1024
_RECORD_BYTES = 16 * 1024
"""Maximum plain bytes of a TLS record."""
_NO_CHECK_TIME = 0x200000
"""OpenSSL's flag to ignore the certificate's dates. Boards start with their clocks at 1970."""

_NO_CERTIFICATE = "it does not have this job's certificate"


class Tls(Encryption):
    """TLS with a job's certificate and key (PEM); ``peer``: the other end's certificate if that differs."""

    def __init__(self, pem: str, peer: str = "") -> None:
        if not ssl.HAS_TLSv1_3:
            raise ConfigError(
                f"This Python's {ssl.OPENSSL_VERSION} has no TLS 1.3, which encryption needs: use a Python "
                "that was built with OpenSSL 1.1.1 or newer, or do without encryption."
            )
        try:
            begin = pem.index("-----BEGIN CERTIFICATE-----")
            self._pinned = ssl.PEM_cert_to_DER_cert((peer or pem[begin:]).strip())
            self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT, peer or pem[begin:])
            self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, peer or pem[begin:])
            # Sessions are not resumed, and tickets that are not sent need not be read.
            self._accepting.num_tickets = 0
            with _as_file(pem) as path:
                self._dialling.load_cert_chain(path)
                self._accepting.load_cert_chain(path)
        except (ValueError, OSError) as problem:
            raise ConfigError(
                f"The certificate that came with the job's key cannot be used: {problem}. "
                "`python -m ringcomm.newkey --encrypt FILE` makes a file with both."
            ) from None
        self.fingerprint = hashlib.sha256(self._pinned).digest()

    def wrap(self, sock: socket.socket, accepted: bool) -> SecureSocket:
        """See :meth:`Encryption.wrap <ringcomm.transport.reactor.Encryption.wrap>`."""
        context = self._accepting if accepted else self._dialling
        return _TlsSocket(sock, context, accepted, self._pinned)


def _context(protocol: Any, certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # There are no names; the certificate is compared after the handshake.
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=certificate)  # This one and no other, none of the system's either.
    return context


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Yield a path under which only this user can read the text: Python loads keys from paths only."""
    try:
        Path("/proc/self/fd").stat()
        descriptor = os.memfd_create("ringcomm", os.MFD_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):
        with tempfile.TemporaryDirectory(prefix="ringcomm-") as folder:
            path = Path(folder, "certificate")
            path.touch(0o600)
            path.write_text(text)
            yield str(path)
        return
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


class _TlsSocket(SecureSocket):
    """TLS over one socket, which it takes over. A byte counts as sent once the whole record that it was
    encrypted in is with the system; the rest comes again with the same bytes, which are not encrypted again.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, accepted: bool, pinned: bytes) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.setblocking(False)
        self.secured = False
        self._pinned = pinned
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepted)
        self._allowance = UNAUTHENTICATED_BYTES
        self._trusted = False
        self._head = b""  # the first bytes that came
        self._staging = memoryview(b"")
        self._dry = True  # nothing more of the received bytes can be decrypted
        self._ended = False
        # Of the last encryption: ciphertext that the system has not taken, and how much it has.
        self._left = memoryview(b"")
        self._gone = 0
        self._plain_bytes = 0  # how many plain bytes it stands for
        self._record_bytes = 1  # how long the ciphertext of a full record is
        self._counted = 0  # how many of the plain bytes have been reported to the caller as sent

    # ---- the handshake -----------------------------------------------------------------------

    def handshake(self) -> bool:
        while not self.secured:
            try:
                self._tls.do_handshake()
                self._check_certificate()
                self.secured = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as problem:
                self._post()  # which sends an alert to the other end
                raise AuthenticationError(_why(problem)) from None
            self._post()
            if not self.secured:
                try:
                    self._fill()
                except BlockingIOError:
                    return False
                if self._ended:
                    raise ClosedEarly("it closed the connection during the handshake")
                refusal = plain_answer(self._head)  # in plain text
                if refusal is not None:
                    raise refusal
        return True

    def _check_certificate(self) -> None:
        # OpenSSL trusts this one alone, so this cannot fail. It says what the security rests on.
        if self._tls.getpeercert(binary_form=True) != self._pinned or self._tls.version() != "TLSv1.3":
            raise AuthenticationError(_NO_CERTIFICATE)

    def _post(self) -> None:
        """Send TLS's own messages. A new connection has room for them."""
        data = self._outgoing.read()
        if data:
            super().sendall(data)

    def trust(self) -> None:
        self._trusted = True
        self._staging = memoryview(b"")

    # ---- receiving ---------------------------------------------------------------------------

    def buffered(self) -> bool:
        return not self._dry and (self._tls.pending() > 0 or self._incoming.pending > 0)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = flat(memoryview(buffer))
        return self._receive([view[:nbytes] if nbytes else view])

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> Tuple[int, List[Any], int, Any]:
        return self._receive([flat(memoryview(item)) for item in buffers]), [], 0, None

    def _receive(self, views: List[memoryview]) -> int:
        views = [view for view in views if view.nbytes]
        if not views:
            return 0
        got = 0 if self._dry else self._decrypt(views)
        while not got and not self._ended:
            self._fill()
            got = self._decrypt(views)
        return got

    def _decrypt(self, views: List[memoryview]) -> int:
        """Fill the views with decrypted bytes; return how many."""
        total = 0
        try:
            for view in views:
                position, length = 0, view.nbytes
                while position < length:
                    got = self._tls.read(length - position, view[position:])
                    if not got:
                        self._ended = self._dry = True
                        return total
                    position += int(got)
                    total += int(got)
        except ssl.SSLWantReadError:
            self._dry = True
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._ended = self._dry = True
        except ssl.SSLError as problem:
            if not self._trusted:
                raise AuthenticationError(_why(problem)) from None
            raise ConnectionAbortedError(
                errno.ECONNABORTED, f"what arrived was damaged or forged on the way ({_why(problem)})"
            ) from None
        return total

    def _fill(self) -> None:
        """Read available bytes from the socket, once."""
        if not self._staging:
            self._staging = memoryview(bytearray(_STAGING_BYTES))
        limit = len(self._staging) if self._trusted else min(len(self._staging), self._allowance)
        if not limit:
            raise ProtocolError(f"it sent {UNAUTHENTICATED_BYTES} bytes and proved nothing")
        got = super().recv_into(self._staging[:limit])
        if not got:
            self._incoming.write_eof()
            self._ended = True
            return
        if not self._trusted:
            self._allowance -= got
            self._head = (self._head + bytes(self._staging[:got]))[:_HEAD_BYTES]
            if self._head.startswith(MAGIC[:1]):
                return  # TLS does not begin like that.
        self._incoming.write(self._staging[:got])
        self._dry = False
        if got == len(self._staging) < _MAX_STAGING_BYTES:
            self._staging = memoryview(bytearray(4 * got))  # a lot is coming

    # ---- sending -----------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        return self._transmit([flat(memoryview(data))])

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = flat(memoryview(data))
        while view:
            view = view[self._transmit([view]) :]

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        return self._transmit([flat(memoryview(item)) for item in buffers])

    def _transmit(self, views: List[memoryview]) -> int:
        wanted = sum(view.nbytes for view in views)
        if not wanted:
            return 0
        if self._counted == self._plain_bytes:
            self._encrypt(_front(views))
        if self._left:
            self._flush()
        # Only whole records can be decrypted at the other end.
        ready = self._gone // self._record_bytes * _RECORD_BYTES if self._left else self._plain_bytes
        count = min(wanted, ready - self._counted)
        if not count:
            raise BlockingIOError(errno.EAGAIN, "the system takes no more now")
        self._counted += count
        return count

    def _encrypt(self, data: memoryview) -> None:
        self._tls.write(data)
        cipher = self._outgoing.read()
        records = -(-data.nbytes // _RECORD_BYTES)
        self._left, self._gone = memoryview(cipher), 0
        self._plain_bytes, self._counted = data.nbytes, 0
        # All records exceed their content by the same length, or nothing counts before all are sent.
        extra, odd = divmod(len(cipher) - data.nbytes, records)
        self._record_bytes = len(cipher) if odd else _RECORD_BYTES + extra

    def _flush(self) -> None:
        try:
            while self._left:
                sent = super().send(self._left)
                self._left = self._left[sent:]
                self._gone += sent
        except BlockingIOError:
            pass


def _front(views: List[memoryview]) -> memoryview:
    """Return what to encrypt next: the first view, or several short ones (header and content) together."""
    if views[0].nbytes >= _RECORD_BYTES or len(views) == 1:
        return views[0][:_BATCH_BYTES]
    return memoryview(b"".join(clipped(views, _BATCH_BYTES)))


def _why(problem: ssl.SSLError) -> str:
    """Return OpenSSL's finding in words that help."""
    reason = str(problem.reason or problem)
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "ALERT_DECRYPT_ERROR" in reason:
        return f"{_NO_CERTIFICATE} (or we have the wrong one)"
    if "VERSION" in reason or "HTTP" in reason or "UNEXPECTED_MESSAGE" in reason:
        return UNENCRYPTED
    return f"{UNENCRYPTED} ({reason.lower().replace('_', ' ')})"
