"""Planted faults: a repeatable proof that the tests would notice a broken requirement.

Each entry of a list (`lists/*.toml`, one per area) names requirement ids, a file, a text that occurs there exactly
once, what to put in its place, and the tests that must turn red:

    ["trust counts from the answer"]
    ids = ["E14"]
    file = "leader/sublet_leader/election/machine.py"
    find = "event.attempt_started + lease_duration_s"
    replace = "now + lease_duration_s"
    tests = ["tests/unit/test_election.py"]

`python -m tools.mutations` copies the tree, checks that the tests are green there as it is, plants one fault at a time
and runs them. A mutant is *killed* only by a test that failed in its body: a fault that breaks the import, a fixture or
the collection has proved nothing and is reported as *broken*.

Other faults are drawn: thirty per run, by a seed (the date, or that of `--seed`), from all `possible_faults` of the
product where a lock, a part of a condition, a boundary, the order of two reads or a guard could be wrong. Near tests
are run until one fails; a fault that survives is printed, and needs a test or, if no test could detect it, a reason in
`equivalent.toml`, after which it is not drawn any more. `--sample 30` leaves the lists out.
"""
