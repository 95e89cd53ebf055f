"""Authentication and authorization of calls to a node: one interceptor before every RPC.

`rpc_rights` is the table of what each RPC needs and how large its request may be, `bounded_request_parser` parses
within that, `access_cache` has the rules and tokens in memory, `gate` decides by them, `interceptor` puts the gate
before a gRPC server, `public_call_limiter` (with `client_address_counts`) bounds calls without
authentication, `audit` logs what was refused and done, and `client_access_token` is the client's side.
"""
