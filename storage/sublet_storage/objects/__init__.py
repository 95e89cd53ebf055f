"""Payloads outside of Postgres: on a shared file system, or in an S3-compatible store.

A block's row stays in Postgres, with its offsets, topics and epochs; only the bytes go, as an object per block, and the
row has their location (`uri`). `location` parses locations; `object_stores` writes, reads and deletes there;
`remote_reads` reads blocks for `sublet_storage.log.fetch`, and checks that what it gets is what was put there.
`sublet_storage.spaces.tiering` moves payloads out, `unreferenced_objects` deletes what no row names,
`sublet_storage.spaces.payload_restore` brings payloads back, `sublet_storage.doctor.location_checks` checks that
locations can be reached.

An object is written before a row names it, under a name that was never used before, and is deleted after no row names
it any more. The table `payload_object` has a row for each object in between, so that a crash leaves nothing behind that
is forgotten. Objects are never found by listing what is there: a location may be shared.
"""
