"""The deployable service: elects leaders of groups, and lends streams to borrowers. See README.md.

A **node** is a process; in it live the **leaders** of some groups, one per group in the whole deployment. Nothing that
a leader remembers is needed by its successor: the rows say everything.
"""
