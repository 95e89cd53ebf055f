"""The deployable service: elects leaders of groups and grants streams to borrowers.

A **node** is a process; it runs the **leaders** of some groups, one per group in the entire deployment. A leader's
successor needs nothing from its memory: all state is in the rows. See README.md.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
"""gRPC writes a line to stderr for each header that it cannot parse, before anybody is authenticated: 45 MB/s for a
client that sends 2. It reads this when it is first imported."""
