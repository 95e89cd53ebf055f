"""The wire format, `sublet.proto`, and the code generated from it by `tools/generate_protocol.py`.

The generated code is checked in, and made by a compiler old enough (protobuf 4.25, grpcio 1.62) that it imports under
every later version too.
"""
