"""The deployable service: elects leaders of groups and grants streams to borrowers.

A **node** is a process; it runs the **leaders** of some groups, one per group in the entire deployment. A leader's
successor needs nothing from its memory: all state is in the rows. See README.md.
"""
