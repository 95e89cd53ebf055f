"""Whole lives of nodes and consumers, simulated from one number.

**One seed is one run.** Three nodes, some processes with subscriptions, one to three groups and the in-memory twin of
the group tables live in virtual time, some hundred times faster than the real one. Everything random comes from one
generator, so a seed that fails fails again, line by line. All machines (`sublet_leader.node.machine.Node`,
`sublet_borrower.machine.agent.Agent`) and all rules of the rows (`sublet_storage.groups.model.lending_rules`) are the
product's own; what is simulated is what lies between them and under them. gRPC, Postgres and Spark are not here:
`tests/integration` has them.

**First the safety phase** (`troubles`): messages are lost, late, repeated and out of order (`network`); processes
are parted, one way or both; each has a clock that runs up to 8 % too fast or too slow and begins anywhere
(`process`); nodes and consumers crash, pause past their leases, come back, leave, restart one after the other; the
database is slow, hangs, is down, is cut off from one node, leaves it unknown whether it has committed (`database`),
and its clock, by which leases are judged, is set back; streams roll over, are resharded and taken by retention;
operators revoke, force releases, delete groups and declare them anew with other options (`groups`); named processes
return, or are started twice, also while the older one hears of nobody; users break off in the middle of a call.
Generations without a message follow each other, and topics move to another space and back (`turnover`). In some runs
hours pass, by which spaces roll over and retention takes what is old, and blocks are merged under their readers
(`maintenance`). Groups are
paused, reset, exported and imported at work, and begin at a time or an offset of a past of hours (`operators`).
Some users write output and progress in one transaction, whose commit may get no answer (`transactions`), and now and
then the database fails over to a standby that is behind (`failover`), or a stream loses its end under holders that are
quiet (`lowered_heads`). Publishers (`publishers`) publish in epochs,
in some runs in pairs of numbers, skip some, run ahead, leave and die; a third of the groups are atomic, and their
streams are consumed in whole epochs (`entire`) by the product's own plan of them. Some runs have a streaming query
(`queries`), which plans ahead, dies between any two steps and comes back to its checkpoint. Each run has its own
mixture.
**Then the liveness phase**: the faults end, and everything must come to rest: all consumed, durable, shared out,
led by one, nobody waiting.

**The checkers** (`checkers`) stand outside of the code. They know what users were given, what sessions reported and
what the store answered, and compare: one holder for a grant, each key in the order of its publisher (`journal`),
nothing lost, nothing twice but in a range that a forced move announced, nothing twice in a query's sink that it came
back to in time, no epoch in part or before it is completed, each said to be consumed once and only when it is, no
progress backwards, no writing without the term, a history from which all of this could be told again, no older
process of a name beside a newer one. A `Violation` ends the run.

**The faults** (`faults.toml`) prove that they can see: each breaks the product in one place, and the simulator alone
must notice within a thousand seeds. `exceptions` names the few pairs of the machines' tables that no run brings
about; all others occur, or a test says so.

How to run it is in `README.md` beside this page.
"""
