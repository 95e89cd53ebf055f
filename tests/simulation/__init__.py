"""Deterministic simulation of nodes and consumers, with one run per seed.

**One seed is one run.** Three nodes, some processes with subscriptions, one to three groups and the in-memory twin of
the group tables run in virtual time, some hundred times faster than the real one. Everything random comes from one
generator, so that a seed that fails fails again, line by line. All machines (`sublet_leader.node.machine.Node`,
`sublet_borrower.machine.agent.Agent`) and all rules of the rows (`sublet_storage.groups.model.lending_rules`) are the
product's own; what is simulated is between and below them. gRPC, Postgres and Spark are not here: `tests/integration`
has them.

**First the safety phase** (`fault_injector`): messages are lost, late, duplicated and out of order (`world`); processes
are partitioned, in one or both directions; each has a clock that runs up to 8 % too fast or too slow and begins
anywhere (`world`); nodes and consumers crash, pause past their leases, come back, leave, restart one after the other;
the database is slow, hangs, is down, is cut off from one node, leaves the outcome of a commit unknown (`database`), and
its clock, by which leases are checked, is set back; streams roll over, are resharded and deleted by retention;
operators revoke, force releases, delete groups and declare them anew with other options (`operators`); named processes
return, or are started twice, also while the older one is cut off; users abort in the middle of a call. Generations
without a message follow each other, and topics move to another space and back (`streams`). In some runs hours pass, by
which spaces roll over and retention deletes what is old, and blocks are merged under their readers (`streams`). Groups
are paused, reset, exported and imported while they work, and begin at a time or an offset of a past of hours
(`operators`). Some users write output and progress in one transaction, whose commit may get no reply (`transactions`),
and now and then the database fails over to a standby that is behind (`database`), or a stream loses its end under idle
holders (`streams`). Publishers (`publishing`) publish in epochs, in some runs in pairs of numbers, skip some, run
ahead, leave and die; a third of the groups are atomic, and their streams are consumed in whole epochs (`sessions`) with
the product's own planner. Some runs have a streaming query (`queries`), which plans ahead, dies between any two steps
and restarts from its checkpoint. Each run has its own mixture. **Then the liveness phase**: the faults end, and the run
must come to rest: all consumed, durable, balanced, led by one node, nothing waiting.

**The checkers** (`checkers`) are outside of the code under test. They compare what users received, what sessions
reported and what the store answered: one holder for a grant, each key in the order of its publisher (`publishing`),
nothing lost, nothing twice but in a range that a forced move announced, nothing twice in the sink of a query that came
back in time, no epoch in part or before it is completed, each reported as consumed once and only when it is, no
progress backwards, no write without the term, a history from which all of this can be reconstructed, no older process
of a name beside a newer one. A `Violation` ends the run.

**The faults** (`faults.toml`) prove that the checkers work: each breaks the product in one place, and the simulator
alone must notice within a thousand seeds. `EXCEPTIONS` (`runs`) lists the few pairs of the machines' tables that no run
brings about; all others occur, or a test reports them.

How to run it is in `README.md` in this folder.
"""
