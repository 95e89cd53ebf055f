"""The interceptor that puts a gate before every method of a gRPC server."""

from __future__ import annotations

import logging
import ssl
import traceback
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import PermissionDenied, Unauthenticated, Unavailable
from sublet_protocol.domain.limits import MAX_BATCHES_OF_PRINCIPAL
from sublet_protocol.gate.bounded_request_parser import parse_request
from sublet_protocol.gate.caller_turns import CallerTurns, SlicedWork
from sublet_protocol.gate.gate import UNKNOWN, AccessGate, Caller
from sublet_protocol.gate.principal_concurrency_limiter import PrincipalCallLimiter
from sublet_protocol.gate.public_call_limiter import PublicCallLimiter
from sublet_protocol.gate.rpc_rights import RPC_RIGHTS, RpcRight

log = logging.getLogger(__name__)

NO_SUCH_METHOD = "there is no method of that name here that anybody may call."
NOT_CHECKED = "the node failed at this request; its log says why"


class GateInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The first interceptor of a server. A method without a row in `RPC_RIGHTS` is refused to every caller.

    An unknown caller is refused before the message is read: else strangers could leave any number of messages
    unfinished, which the node would store. One with a certificate is refused, if that names no principal, once its
    message is read. Where messages are read here, one that has the method's right on nothing is refused before, too.
    """

    def __init__(self, gate: AccessGate) -> None:
        self._gate, self._open_calls = gate, PublicCallLimiter()
        self._turns = CallerTurns()
        self._limiters = {
            "/sublet.v1.Session/Commands": PrincipalCallLimiter(MAX_BATCHES_OF_PRINCIPAL),
            "/sublet.v1.Session/Poll": PrincipalCallLimiter(),
            "/sublet.v1.Feed/Publish": PrincipalCallLimiter(MAX_BATCHES_OF_PRINCIPAL),
        }

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the method's handler behind the gate."""
        method = handler_call_details.method
        needed, handler = RPC_RIGHTS.get(method), await continuation(handler_call_details)
        if handler is None and not self._gate.is_on:
            return None  # gRPC answers that there is no such method
        if handler is None or needed is None:
            return _make_refusal(grpc.StatusCode.PERMISSION_DENIED, NO_SUCH_METHOD)
        if needed.is_public:
            return self._open_calls.limit_handler(handler, needed.max_bytes)
        authorization = _find_authorization(handler_call_details.invocation_metadata)
        try:
            is_known = await self._gate.read_unknown(authorization)
        except Unavailable as error:
            return _make_refusal(grpc.StatusCode.UNAVAILABLE, str(error))
        return self._wrap_handler(handler, method, needed) if is_known else self._refuse_stranger(method)

    def _refuse_stranger(self, method: str) -> Any:
        async def refuse(unread: Any, context: Any) -> None:
            await self._admit_call(context, method)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNKNOWN)  # authenticated by now, and the call is over

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _wrap_handler(self, handler: Any, method: str, needed: RpcRight) -> Any:
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        kinds = {
            (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        }
        inner, make = kinds[streams_in, streams_out]

        limiter = self._limiters.get(method) if self._gate.is_on else None

        async def serve(request: Any, context: Any) -> Any:
            caller = await self._admit_call(context, method)
            if limiter is not None and needed.right is not None:
                await _abort_without_right(caller, needed.right, context)
            raw = request if limiter is None else await limiter.read(request, str(caller.principal), context)
            parse = partial(parse_request, raw, handler.request_deserializer, needed.max_bytes, context)
            parsed = [await (parse() if limiter is None else self._take_turn(caller, parse))]
            if limiter is not None:
                await _abort_unless_valid(caller, context)  # it has waited: for its turns, and for its client
            reply = await inner(parsed.pop(), context)
            await _abort_unless_checked(caller, needed, context)
            return reply

        async def call(request: Any, context: Any) -> Any:
            serving = serve(request, context)
            del request, context
            try:
                return await serving
            except BaseException as error:
                _release_frames(error)
                raise

        if limiter is not None:
            make = grpc.stream_unary_rpc_method_handler
        return make(call, None, handler.response_serializer)

    async def _take_turn(self, caller: Caller, parse: Callable[[], Awaitable[Any]]) -> Any:
        """Parse one request a round of the loop, which may take the time of many calls. Parsing begins with the turn,
        which a call that is cancelled does not get."""
        async with SlicedWork(self._turns, str(caller.principal)):
            return await parse()

    async def _admit_call(self, context: Any, method: str) -> Caller:
        authorization = _find_authorization(context.invocation_metadata())
        try:
            certificate = _find_certificate(context) if self._gate.by_certificate else None
            caller = self._gate.identify(authorization, context.peer(), method.rpartition("/")[2], certificate)
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise AssertionError("abort raises") from None
        self._gate.enter(caller)
        return caller


async def _abort_unless_valid(caller: Caller, context: Any) -> None:
    """Abort the call of a caller whose token or certificate is no longer valid."""
    try:
        caller.check_identity()
    except Unauthenticated as error:
        caller.note_refusal("a request that came once the caller's token or certificate was no longer valid")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


async def _abort_without_right(caller: Caller, right: Right, context: Any) -> None:
    """Abort the call of a caller that has the right on nothing."""
    try:
        caller.check_somewhere(right)
    except PermissionDenied as error:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))


async def _abort_unless_checked(caller: Caller, needed: RpcRight, context: Any) -> None:
    """Abort the call of a method that has not checked the right in its row: it is broken, and its reply is kept
    back.
    """
    if needed.right is not None and caller.principal is not None and not caller.is_checked:
        log.error("call refused, its method checks no right: action=%s right=%s", caller.action, needed.right)
        await context.abort(grpc.StatusCode.INTERNAL, NOT_CHECKED)


def _release_frames(error: BaseException) -> None:
    """Release what the frames of a failed call have, such as its request, and the context: that has the error again, so
    that all would be left to the collector, which comes late where objects are few and large."""
    passed: BaseException | None = error
    while passed is not None:
        traceback.clear_frames(passed.__traceback__)
        passed = passed.__context__


def _find_authorization(metadata: Iterable[tuple[str, Any]] | None) -> Any:
    return next((value for key, value in metadata or () if key == "authorization"), None)


def _find_certificate(context: Any) -> bytes | None:
    """Return what the client has shown, in DER."""
    shown = context.auth_context().get("x509_pem_cert")
    return ssl.PEM_cert_to_DER_cert(shown[0].decode()) if shown else None


def _make_refusal(code: grpc.StatusCode, text: str) -> Any:
    async def refuse(unread: Any, context: Any) -> None:
        await context.abort(code, text)

    return grpc.stream_unary_rpc_method_handler(refuse)
