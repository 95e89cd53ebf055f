"""Who calls a node, and whether it may: one interceptor before every RPC, and one table of what each needs.

`rpc_rights` is the table, `access_cache` has the rules and tokens in memory, `gate` decides by them, `interceptor` puts
the gate before a gRPC server, `audit` writes down what was refused and done, and `credentials` is the client's side.
"""
